"""Lowest versions are made from pyproject.toml, and only a registry that does not answer excuses a stage."""

import json
import re

import pytest
from audit import audited
from environments import ROOT, lowest, project, requirements, unreachable
from oldest import LONG, TESTS, needed


@pytest.mark.parametrize("group", ["build", "core", "exact", "test"])
def test_every_requirement_names_its_lowest_version(group):
    texts = requirements(group)
    assert texts and lowest(texts) == [text.replace(">=", "==") for text in texts]


@pytest.mark.parametrize(
    "text", ["numpy", "numpy<3", "numpy>1", "numpy>=1.26,<3", "numpy>=1.26; python_version < '3.12'", "numpy>=1.*"]
)
def test_another_form_is_refused(text):
    with pytest.raises(SystemExit, match="names no lowest version"):
        lowest(["numba>=0.61", text])


def test_the_classifiers_name_the_pythons_that_ci_tests():
    tested = re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.*)\]", (ROOT / ".github/workflows/tests.yml").read_text())[1])
    named = [text.rpartition(" ")[2] for text in project()["project"]["classifiers"] if ":: Python :: 3." in text]
    assert named == tested


def test_the_oldest_environment_has_no_torch():
    names = [pin.partition("==")[0] for pin in needed()]
    assert "numpy" in names and "pyscipopt" in names and "pytest" in names and "torch" not in names


def test_the_tests_for_the_oldest_versions_exist():
    assert [name for name in TESTS if not (ROOT / "tests" / name.partition("::")[0]).exists()] == []
    for name in (*LONG, *(name for name in TESTS if "::" in name)):
        file, _, test = name.partition("::")
        assert (file in TESTS) == (name in LONG) and f"def {test}(" in (ROOT / "tests" / file).read_text(), name


def test_an_audit_names_what_is_vulnerable_and_knows_when_nobody_answered():
    package = {"name": "numpy", "version": "1.26", "vulns": [{"id": "CVE-1", "fix_versions": ["2.0", "2.1"]}]}
    fine, unknown = {"name": "click", "version": "8.1", "vulns": []}, {"name": "foremoe", "skip_reason": "not found"}
    fault = "numpy 1.26: CVE-1, mended in 2.0, 2.1"
    assert audited(json.dumps({"dependencies": [package, fine, unknown]})) == (2, [fault])
    assert audited(json.dumps({"dependencies": [unknown]})) == audited("") == (0, [])


@pytest.mark.parametrize(
    ("log", "excused"),
    [
        ("ERROR: Could not find a version that satisfies the requirement numba==0.61 (from versions: none)", True),
        ("WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError(...)': /simple/numba/", True),
        ("ERROR: Could not find a version that satisfies the requirement pyscipopt==5 (from versions: 5.0.1, 5.1.1)", False),
        (
            "ERROR: Cannot install numba==0.61.0 and numpy==2.9 because these package versions have conflicting dependencies.",
            False,
        ),
    ],
)
def test_what_excuses_a_stage(log, excused):
    assert unreachable(log) == excused
