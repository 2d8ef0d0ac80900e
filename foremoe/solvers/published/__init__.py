"""Re-implementations of the rank solvers of published systems, for comparison. Nothing else in foremoe depends on them."""
