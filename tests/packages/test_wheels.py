"""`make dist` finds what is wrong with a package; the packages here are small ones."""

import io
import tarfile
import zipfile

import pytest
import wheels

GOOD = {
    "foremoe/__init__.py": "",
    "foremoe/py.typed": "",
    "foremoe-0.1.dist-info/licenses/LICENSE": "",
    "foremoe-0.1.dist-info/METADATA": "",
}
FILES = ["LICENSE", "README.md", "foremoe/__init__.py", "foremoe/py.typed", "pyproject.toml", "tests/test_tree.py"]


def wheel_of(folder, content):
    path = folder / "foremoe-0.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in content.items():
            archive.writestr(name, text)
    return path


@pytest.fixture
def source(tmp_path):
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


def test_a_wheel_that_is_the_tree_passes(source):
    wheels.check_wheel(wheel_of(source, GOOD), source, FILES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"foremoe/py.typed": None}, "differs from the tree in foremoe/py.typed"),
        ({"foremoe/__init__.py": "changed"}, "differs from the tree in foremoe/__init__.py"),
        ({"foremoe/left_over.py": ""}, "differs from the tree in foremoe/left_over.py"),
        ({"tests/test_tree.py": ""}, "beside the package the wheel holds foremoe-0.1.dist-info, tests"),
        ({"foremoe-0.1.dist-info/licenses/LICENSE": None}, "no licence"),
    ],
)
def test_a_wheel_that_is_not_fails(source, change, message):
    content = {name: text for name, text in (GOOD | change).items() if text is not None}
    with pytest.raises(SystemExit, match=message):
        wheels.check_wheel(wheel_of(source, content), source, FILES)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (FILES[:5], None),
        (FILES, "holds tests/test_tree.py"),
        (FILES[:3] + FILES[4:5], "lacks foremoe/py.typed"),
    ],
)
def test_an_sdist_has_the_package_and_no_tests(tmp_path, names, message):
    path = tmp_path / "foremoe-0.1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"foremoe-0.1/{name}"), io.BytesIO())
    if message is None:
        return wheels.check_sdist(path, FILES)
    with pytest.raises(SystemExit, match=message):
        wheels.check_sdist(path, FILES)
