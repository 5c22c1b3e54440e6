"""Tests of what a release and a host need: metadata, the README outside of the repository, settings of hosted services, recipes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from types import ModuleType

import pytest
from scripts import ROOT

import nbcnn
from nbcnn.gpu.device import SIMULATOR

pytestmark = pytest.mark.skipif(SIMULATOR, reason="reads files: once is enough")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HOME = "https://host.example/owner/nbcnn"
HOSTED = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "custom.github-workflows-require-timeout": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.citation-file-format": "CITATION.cff",
}
"""Schemas that check-jsonschema brings, and the files that they are for."""
REGISTRIES = (
    *("pypi", "pythonhosted", "docker", "quay", "ghcr", "nvcr", "anaconda", "conda", "mcr.microsoft"),
    *("registry.npmjs", "registry-1.docker", "pypi.nvidia", "test.pypi"),
)


@pytest.fixture(scope="module")
def hook():
    """The module of hatchling's hook, with a stand-in for hatchling, which only builds have."""
    names = ["hatchling", "hatchling.metadata", "hatchling.metadata.plugin", "hatchling.metadata.plugin.interface"]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)
    sys.modules[names[-1]].MetadataHookInterface = type("MetadataHookInterface", (), {})
    spec = importlib.util.spec_from_file_location("metadata_hook", ROOT / ".ci" / "metadata_hook.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    for name in names:
        del sys.modules[name]
    sys.modules.update({name: module for name, module in before.items() if module})
    return made


def links(text):
    return re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", text)


def test_the_readme_outside_of_the_repository_links_into_it(hook):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    told = hook.readme(text, ROOT, HOME, "v1.2.3")
    assert len(links(told)) == len(links(text)) > 30
    for before, after in zip(links(text), links(told), strict=True):
        if "://" in before or before.startswith("#"):
            assert after == before
            continue
        form, _, path = after.removeprefix(f"{HOME}/").partition("/v1.2.3/")
        assert path == before
        here = ROOT / path.partition("#")[0]
        assert form == ("raw" if here.suffix == ".svg" else "tree" if here.is_dir() else "blob")
        assert here.exists(), "a link to nothing"


def test_the_readme_without_a_repository_has_no_dead_link(hook):
    text = "See [the ladder](docs/results/ladder.md#a) and [us](https://host.example).\n\n![a picture](docs/pictures/ladder.svg)\n"
    assert hook.readme(text, ROOT, None, "v1") == "See the ladder and [us](https://host.example).\n\n\n"
    whole = hook.readme((ROOT / "README.md").read_text(encoding="utf-8"), ROOT, None, "v1")
    assert not [link for link in links(whole) if "://" not in link and not link.startswith("#")]
    assert hook.addresses(None, "v1") == {}


def test_addresses_are_below_the_repository(hook):
    assert hook.addresses(HOME, "v1")["Security"] == f"{HOME}/security/advisories/new"
    assert all(address.startswith(HOME) for address in hook.addresses(HOME, "v1").values())
    assert "/security/advisories/new" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_the_version_has_a_section_of_changes_and_a_date():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(nbcnn.__version__)} — (\d{{4}}-\d\d-\d\d)$", changes, re.M)
    assert found, "no section of this version"
    assert f"\ndate-released: {found[1]}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_conda_recipe_asks_for_what_pyproject_asks_for():
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    assert re.search(r'^  version: "(.*)"$', recipe, re.M)[1] == nbcnn.__version__
    run = recipe.partition("\n  run:\n")[2].partition("\n\n")[0]
    wanted = [re.sub(r"^([\w-]+)", r"\1 ", each) for each in PROJECT["dependencies"] if ";" not in each]
    assert [line.strip().removeprefix("- ") for line in run.splitlines()] == [f"python {PROJECT['requires-python']}", *wanted]
    host = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    assert re.sub(r"^([\w-]+)", r"\1 ", host[0]) in recipe


def test_every_python_that_is_promised_is_tested_by_the_host():
    promised = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", each)}
    (matrix,) = re.findall(r"^ +python: \[(.*)\]$", (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"), re.M)
    assert set(re.findall(r'"(.*?)"', matrix)) == promised == {"3.11", "3.12", "3.13", "3.14"}


def test_extras_of_the_container_are_those_that_there_are():
    (extras,) = re.findall(r'"/src\[(.*)\]"', (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert (ROOT / ".devcontainer" / settings["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"


def test_no_file_names_the_host_of_a_registry():
    hosts = re.compile(rf"\b(?:{'|'.join(map(re.escape, REGISTRIES))})\.(?:org|com|io|cloud)\b")
    for name in (".github", ".devcontainer", ".ci", "packaging", "Dockerfile", ".pre-commit-config.yaml", "pyproject.toml", "README.md", "docs"):
        for path in [ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"):
            if path.is_file() and path.suffix not in (".png", ".pyc"):
                assert not (found := hosts.search(path.read_text(encoding="utf-8"))), f"{path.relative_to(ROOT)}: {found[0]}"


@pytest.mark.full
@pytest.mark.parametrize("schema", HOSTED)
def test_what_a_host_reads_fits_its_schema(schema):
    pytest.importorskip("check_jsonschema", reason='pip install -e ".[release]" has what knows the schemas')
    paths = sorted(ROOT.glob(HOSTED[schema]))
    assert paths
    done = subprocess.run([sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.full
def test_yaml_is_yaml():
    yaml = pytest.importorskip("yaml", reason='pip install -e ".[docs]" has a reader of YAML')
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["package"]["name"] == PROJECT["name"]
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert {hook["entry"].split()[0] for hook in local["hooks"]} == {"ruff", "lint-imports"}


@pytest.mark.full
def test_a_release_has_addresses_and_no_results(tmp_path):
    pytest.importorskip("build", reason='pip install -e ".[release]" has what builds')
    environment = os.environ | {"NBCNN_REPOSITORY": HOME}
    words = [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT]
    done = subprocess.run([*map(str, words)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    (wheel,) = tmp_path.iterdir()
    assert wheel.stat().st_size < 2_500_000
    with zipfile.ZipFile(wheel) as opened:
        assert not [name for name in opened.namelist() if name.startswith("nbcnn/lab/results/")]
        metadata = Parser().parsestr(next(opened.read(name).decode() for name in opened.namelist() if name.endswith("METADATA")))
    assert f"Source, {HOME}" in metadata.get_all("Project-URL")
    assert metadata["Author"] == "The nbcnn authors"
    assert f"({HOME}/raw/v{nbcnn.__version__}/docs/pictures/ladder.svg)" in metadata.get_payload()
