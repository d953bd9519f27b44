"""What a user installs: the wheel, on its own, away from the checkout."""

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
PACKAGE = "lightning_forge_profiling"
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # From a copy: setuptools would pack what an earlier build left in the checkout's build/ folder.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source)
    shutil.copytree(CHECKOUT / PACKAGE, source / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(source)]
    subprocess.run(build, check=True, cwd=source)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("installed")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True)
    return target


def run_away_from_the_checkout(installed, program, cwd):
    """Run `program` where only the installed wheel, its dependencies and the standard library can be imported.

    -S leaves site-packages' .pth files unread, among them the one that makes an editable install importable.
    """
    packages = [str(installed), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    program = f"import sys; sys.path[:0] = {packages}\n{program}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], check=True, capture_output=True, text=True, cwd=cwd
    )
    return done.stdout.splitlines()


def test_it_holds_every_file_of_the_package(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(f"{PACKAGE}/")}
    files = {
        path.relative_to(CHECKOUT).as_posix()
        for path in (CHECKOUT / PACKAGE).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert f"{PACKAGE}/py.typed" in packed
    assert packed == files


def test_it_carries_the_licence_and_nothing_beside_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    stem = f"{PACKAGE}-{PROJECT['version']}.dist-info"
    assert f"{stem}/licenses/LICENSE" in names
    assert {name.split("/")[0] for name in names} == {PACKAGE, stem}


def test_its_version_is_the_one_in_pyproject(installed, tmp_path):
    program = f"""
import importlib.metadata, {PACKAGE}
print({PACKAGE}.__file__)
print({PACKAGE}.__version__)
print(importlib.metadata.version("{PROJECT["name"]}"))
"""
    file, *versions = run_away_from_the_checkout(installed, program, tmp_path)
    assert Path(file).is_relative_to(installed)
    assert versions == [PROJECT["version"]] * 2


def test_importing_it_loads_neither_torch_nor_lightning(installed, tmp_path):
    program = f"import {PACKAGE}\nprint(*{{'torch', 'lightning', 'pytorch_lightning'}} & set(sys.modules))"
    assert run_away_from_the_checkout(installed, program, tmp_path) == [""]


def test_every_public_name_can_be_used(installed, tmp_path):
    program = f"""
import {PACKAGE}
for name in {PACKAGE}.__all__:
    getattr({PACKAGE}, name)
print(all(module.__file__.startswith({str(installed)!r})
          for name, module in sys.modules.items() if name.startswith("{PACKAGE}")))
"""
    assert run_away_from_the_checkout(installed, program, tmp_path) == ["True"]
