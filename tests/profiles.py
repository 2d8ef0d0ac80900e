"""Number of examples of a property test that is slower, or needs more of them, than others."""

from hypothesis import settings


def examples(number: int) -> settings:
    """Settings with that many examples in the profiles ``dev`` and ``ci``, and as many times more as `nightly` has more."""
    return settings(max_examples=number * max(1, settings.default.max_examples // 50), deadline=None)
