"""What a user installs: the wheel, on its own, away from the checkout."""

import json
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.parser import BytesParser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_importing_it_loads_neither_torch_nor_lightning(installed, tmp_path):
    program = f"import {PACKAGE}\nprint(*{{'torch', 'lightning', 'pytorch_lightning'}} & set(sys.modules))"
    assert run_away_from_the_checkout(installed, program, tmp_path) == [""]


def test_it_asks_for_no_lightning_that_was_malicious(wheel):
    """2.6.2 and 2.6.3 stole credentials when imported (GHSA-w37p-236h-pfx3)."""
    [lightning] = [found for found in map(Requirement, requirements_of(wheel)) if found.name == "lightning"]
    versions = ["2.3.0", "2.4.0", "2.5.0", "2.6.1", "2.6.2", "2.6.3", "2.6.4", "2.6.6", "3.0"]
    assert list(lightning.specifier.filter(versions)) == ["2.4.0", "2.5.0", "2.6.1", "2.6.4", "2.6.6", "3.0"]


def test_what_make_installs_is_what_is_asked_for(wheel):
    lines = (CHECKOUT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    names = {name.lower(): version for name, version in pinned.items()}
    extras = [text for texts in PROJECT["optional-dependencies"].values() for text in texts]
    for requirement in map(Requirement, [*requirements_of(wheel), *extras]):
        if requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(names[requirement.name.lower()]), requirement
    assert names["pytorch-lightning"] == names["lightning"], "which comes with it"


def test_make_lowest_takes_the_lowest_lightning_asked_for(wheel):
    show = ["make", "--silent", "--no-print-directory", "--eval", "floor: ; @echo $(FLOOR)", "floor"]
    floor = subprocess.run(show, check=True, capture_output=True, text=True, cwd=CHECKOUT).stdout.strip()
    [lightning] = [found for found in map(Requirement, requirements_of(wheel)) if found.name == "lightning"]
    assert f">={floor}" in {str(part) for part in lightning.specifier}


@pytest.mark.slow
def test_every_public_name_can_be_used(installed, tmp_path):
    program = f"""
import importlib
for room in ("", ".bench", ".gpu", ".profiler", ".report"):
    module = importlib.import_module("{PACKAGE}" + room)
    assert module.__all__
    for name in module.__all__:
        getattr(module, name)
print(all(module.__file__.startswith({str(installed)!r})
          for name, module in sys.modules.items() if name.startswith("{PACKAGE}")))
"""
    assert run_away_from_the_checkout(installed, program, tmp_path) == ["True"]


# --- beside Lightning, and nothing that an environment for development has besides ------------------------------------


def with_what_they_require(requirements):
    """The distributions that pip would install, by the metadata of those that are installed here."""
    found = {}
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, of_extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        for extra in requirement.extras or {""}:
            if (requirement.name, extra) not in found:
                found[requirement.name, extra] = installed = distribution(requirement.name)
                waiting += [(Requirement(text), extra) for text in installed.requires or ()]
    return found.values()


def new_environment(folder, requirements):
    """A virtual environment with these requirements and theirs, as links to what is installed here."""
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    for installed in with_what_they_require(requirements):
        for name in {path.parts[0] for path in installed.files} - {"..", "__pycache__"}:
            link = packages / name
            if not link.is_symlink():  # several share a namespace such as nvidia/
                link.symlink_to(installed.locate_file(name))
    return folder / "bin" / "python", packages


def requirements_of(wheel):
    """What `pip install` of the wheel brings."""
    [metadata] = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA")]
    found = BytesParser().parsebytes(zipfile.ZipFile(wheel).read(metadata)).get_all("Requires-Dist")
    return [text for text in found if "extra ==" not in text]


@pytest.fixture(scope="module")
def lightning_alone(tmp_path_factory):
    python, _ = new_environment(tmp_path_factory.mktemp("lightning"), ["lightning"])
    return python


@pytest.fixture(scope="module")
def lightning_and_wheel(wheel, tmp_path_factory):
    python, packages = new_environment(tmp_path_factory.mktemp("wheel"), requirements_of(wheel))
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(packages), str(wheel)]
    subprocess.run(install, check=True)
    return python


def run_in(python, cwd, *arguments):
    """The standard output of a Python that knows of no other environment."""
    return subprocess.run([python, "-I", *arguments], check=True, capture_output=True, text=True, cwd=cwd).stdout


LIGHTNING = """
import importlib.metadata, importlib.util, json, sys
import lightning.pytorch
loaded = sorted(sys.modules)
trainer = lightning.pytorch.Trainer(accelerator="cpu", logger=False)
print(json.dumps({
    "rich": importlib.util.find_spec("rich") is not None,
    "distributions": sorted(found.name for found in importlib.metadata.distributions()),
    "loaded": loaded,
    "callbacks": [f"{type(callback).__module__}.{type(callback).__name__}" for callback in trainer.callbacks],
}))
"""


@pytest.mark.slow
def test_installing_it_changes_nothing_about_lightning(lightning_alone, lightning_and_wheel, wheel, tmp_path):
    assert "rich" not in {Requirement(text).name.lower() for text in requirements_of(wheel)}
    before, after = (
        json.loads(run_in(python, tmp_path, "-c", LIGHTNING)) for python in (lightning_alone, lightning_and_wheel)
    )
    assert before["rich"] is after["rich"] is False, "Lightning draws another progress bar and summary where it is"
    assert after["callbacks"] == before["callbacks"]
    assert any("TQDMProgressBar" in name for name in after["callbacks"])
    assert PROJECT["name"] in after["distributions"]
    assert PROJECT["name"] not in before["distributions"]
    # which torch.cuda imports wherever nvidia-ml-py is installed
    assert set(after["loaded"]) ^ set(before["loaded"]) <= {"pynvml"}


def test_a_clean_environment_is_all_that_its_reports_need(lightning_and_wheel, tmp_path):
    trace = CHECKOUT / "tests" / "data" / "traces" / "input_bound"
    printed = run_in(lightning_and_wheel, tmp_path, "-m", PACKAGE, "show", trace)
    assert printed.startswith("verdict     input-bound: ")
