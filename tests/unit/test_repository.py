"""Consistency of the repository: commands of the Makefile, hooks and workflows; names in documents."""

import functools
import importlib
import re

import pytest
import yaml
from scripts import ROOT

import synkhronos

MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def commands_of(target):
    """Return the commands of a target of the Makefile."""
    return re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.M).group(1).replace("$(BIN)", ".venv/bin")


def steps_of(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_targets_of_the_makefile(path):
    runs = [step["run"] for step in steps_of(path) if "run" in step]
    targets = [target for run in runs for target in re.findall(r"^make ([\w-]+)", run, re.M)]
    assert targets
    for target in targets:
        assert commands_of(target)
    assert path.name != "tests.yml" or {"lint", "test", "demo"} <= set(targets)


def supported_pythons():
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())


def jobs_of(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())["jobs"]


def test_workflows_test_each_python_that_is_supported():
    supported, jobs = supported_pythons(), jobs_of("tests")
    assert jobs["test"]["strategy"]["matrix"]["python"] == supported
    with_theano = [version for version in supported if int(version.split(".")[1]) < 12]
    assert jobs["theano"]["strategy"]["matrix"]["python"] == with_theano


def test_releases_have_wheels_for_each_python_and_processor_which_are_tried_before_they_are_published():
    jobs = jobs_of("release")
    uses = {name: [step.get("uses", "").split("@")[0] for step in job["steps"]] for name, job in jobs.items()}
    assert "pypa/cibuildwheel" in uses["wheels"]
    (arm,) = [runner for runner in jobs["wheels"]["strategy"]["matrix"]["runner"] if runner.endswith("-arm")]
    assert jobs["try"]["strategy"]["matrix"]["runner"] == ["ubuntu-latest", arm]
    images = jobs["try"]["strategy"]["matrix"]["image"]
    assert [name for name in images if "python" in name] == [f"python:{one}-slim" for one in supported_pythons()]
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert (jobs["publish"]["environment"]["name"], jobs["publish"]["permissions"]) == ("pypi", {"id-token": "write"})
    assert jobs["publish"]["if"] == "github.event_name == 'push'"
    assert uses["publish"][-1] == "pypa/gh-action-pypi-publish"
    assert jobs["publish"]["steps"][-1]["with"]["attestations"] is True


def test_the_mpijob_starts_a_process_in_each_worker_pod():
    job = yaml.safe_load((ROOT / "docker" / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec, replicas = job["spec"], job["spec"]["mpiReplicaSpecs"]
    assert (spec["mpiImplementation"], spec["slotsPerWorker"]) == ("MPICH", 1)
    assert spec["launcherCreationPolicy"] == "WaitForWorkersReady"
    assert set(replicas) == {"Launcher", "Worker"}
    (launcher,), (worker,) = (replicas[name]["template"]["spec"]["containers"] for name in ("Launcher", "Worker"))
    assert launcher["command"][:5] == ["mpiexec", "-n", str(replicas["Worker"]["replicas"]), "-ppn", "1"]
    assert worker["command"][0] == "/usr/sbin/sshd" and worker["readinessProbe"]["tcpSocket"]["port"] == 22
    assert launcher["image"] == worker["image"]


def hooks(stage):
    """Return the hooks of a stage of pre-commit."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert stage in config["default_install_hook_types"]
    everything = [hook for repo in config["repos"] for hook in repo["hooks"]]
    return [hook for hook in everything if stage in hook.get("stages", config["default_stages"])]


def test_hooks_run_what_lint_runs():
    entries = [hook["entry"] for hook in hooks("pre-commit")]
    programs = [re.sub(r" --\w+| \.$", "", line.strip()) for line in commands_of("lint").splitlines()]
    assert [re.sub(r" --\w+", "", entry) for entry in entries] == programs


@pytest.mark.parametrize(("length", "is_refused"), [(72, False), (73, True)])
def test_hook_refuses_long_commit_subjects(length, is_refused):
    [hook] = hooks("commit-msg")
    assert (hook["language"], hook["args"]) == ("pygrep", ["--multiline"])  # refuses files that match
    message = "x" * length + "\n\n" + "y" * 80
    assert bool(re.search(hook["entry"], message, re.M | re.DOTALL)) == is_refused


def test_lists_of_test_folders_are_complete():
    groups = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    named = re.search(r"testpaths = (\[.*?\])", (ROOT / "pyproject.toml").read_text(), re.DOTALL).group(1)
    assert {f"tests/{group}" for group in groups} == set(re.findall(r'"(.*?)"', named))
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"`tests/{group}`" in contributing for group in groups)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_files_named_on_pages_exist(page):
    text = (ROOT / page).read_text()
    for name in re.findall(r"`((?:synkhronos|tests|docs|demos|extensions|_\w+)/[\w/.-]*)`", text):
        name = name if name.split("/")[0] in ("synkhronos", "tests", "docs", "demos") else f"synkhronos/{name}"
        assert (ROOT / name).exists(), f"{page} names {name}"


def recipes():
    """Return the recipes of CONTRIBUTING.md, by their headings."""
    text = re.search(r"^## Recipes\n(.*?)^## ", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.DOTALL).group(1)
    return dict(re.findall(r"^### (.*?)\n(.*?)(?=^### |\Z)", text, re.M | re.DOTALL))


@functools.cache
def words_of_sources():
    """Return the identifiers in the library, the tests and the demos, and the names of their files."""
    paths = [path for folder in ("synkhronos", "tests", "demos") for path in (ROOT / folder).rglob("*")]
    texts = [path.read_text() for path in paths if path.suffix in (".py", ".pyi", ".c", ".h", ".pml")]
    return {path.name for path in paths}.union(*(re.findall(r"\w+", text) for text in texts))


@pytest.mark.parametrize("title", recipes())
def test_names_in_recipes_exist_in_the_sources(title):
    names = re.findall(r"`([\w.]+)(?:\(.*?\))?`", recipes()[title])
    assert names
    for name in names:
        words = [name] if name.endswith((".py", ".pyi", ".c", ".h")) else re.findall(r"\w+", name)
        for word in words:
            assert word in words_of_sources(), f"CONTRIBUTING.md names {name}"


def diagrams():
    """Return the diagrams of docs/design.md that follow data through the package, by their headings."""
    text = (ROOT / "docs" / "design.md").read_text()
    walks = re.search(r"^## Walks through the code\n(.*?)^## ", text, re.M | re.DOTALL)
    return dict(re.findall(r"^### (.*?)\n.*?^```text\n(.*?)^```", walks.group(1), re.M | re.DOTALL))


def named_functions(text):
    """Return the dotted names in a text that begin with a module or a folder of the package."""
    entries = {path.stem for path in (ROOT / "synkhronos").iterdir()}
    return [name for name in re.findall(r"\w+(?:\.\w+)+", text) if name.split(".")[0] in entries]


def look_up(name):
    """Return the object with a dotted name within the package; raise ImportError or AttributeError without one."""
    path = name.split(".")
    for n in range(len(path), 0, -1):
        module = f"synkhronos.{'.'.join(path[:n])}"
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not module.startswith(str(error.name)):
                raise
        else:
            return functools.reduce(getattr, path[n:], found)
    raise ModuleNotFoundError(f"no module of the package begins the name {name}")


def test_the_design_has_six_diagrams():
    assert len(diagrams()) == 6


@pytest.mark.parametrize("title", diagrams())
def test_functions_named_in_diagrams_exist(title):
    names = named_functions(diagrams()[title])
    assert len(names) >= 10
    for name in names:
        assert callable(look_up(name)), name


def test_a_function_that_does_not_exist_is_detected():
    with pytest.raises(AttributeError):
        look_up("_rank.call.Caller.no_such_method")
    with pytest.raises(AttributeError):
        look_up("_rank.no_such_module.Caller")


def test_links_in_readme_are_absolute_and_lead_to_files():
    """Links in README are absolute, because package registries show it, too, and lead to existing files."""
    repository = re.search(r'Repository = "(.*)"', (ROOT / "pyproject.toml").read_text()).group(1)
    raw = repository.replace("github.com", "raw.githubusercontent.com")
    for target in re.findall(r"\]\(([^)]*)\)", (ROOT / "README.md").read_text()):
        assert target.startswith("https://"), f"README.md links to {target}"
        for base in (f"{repository}/blob/main/", f"{raw}/main/"):
            if target.startswith(base):
                name = target[len(base) :].split("#")[0]
                assert (ROOT / name).exists(), f"README.md links to {name}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_between_files_lead_to_files(page):
    for target in re.findall(r"\]\(([^)]*)\)", (ROOT / page).read_text()):
        assert target.startswith(("https://", "http://")) or (ROOT / target.split("#")[0]).exists(), target


def anchors_of(page):
    """Return the anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^(```+|~~~+).*?^\1", "", page.read_text(), flags=re.M | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.M)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def test_links_to_headings_lead_to_those_of_github():
    pages = [page for page in ROOT.glob("docs/**/*.md") if "_build" not in page.parts]
    for page in [*pages, ROOT / "CONTRIBUTING.md", ROOT / "README.md"]:
        for name, anchor in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", page.read_text()):
            target = page.parent / name if name else page
            assert anchor in anchors_of(target), f"{page.relative_to(ROOT)} links to {name}#{anchor}"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_version_is_the_same_everywhere():
    """The package has the version, which pyproject.toml reads; CITATION.cff and CHANGELOG have it and its date, too."""
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and 'version = { attr = "synkhronos.__version__" }' in project
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.findall(r"^## \[(\d.*)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert (citation["version"], str(citation["date-released"])) == released[0]
    assert synkhronos.__version__ == citation["version"]
    assert sorted(released, reverse=True) == released


def left_out(name):
    """Return the tests that a list of `.ci/run` leaves out, as (file, name, variant)."""
    lines = (ROOT / ".ci" / f"{name}.txt").read_text().splitlines()
    return [re.fullmatch(r"--deselect=(tests/\w+/test_\w+\.py)(?:::(\w+)(\[.*)?)?", line).groups() for line in lines]


@pytest.mark.parametrize("name", ["theano-only", "pytensor-only", "long"])
def test_tests_that_ci_leaves_out_exist(name):
    tests = left_out(name)
    assert tests == sorted(set(tests), key=lambda one: [part or "" for part in one])
    for path, test, _ in tests:
        assert re.search(rf"^(def|class) {test or ''}", (ROOT / path).read_text(), re.M), (path, test)


def test_ci_runs_each_variant_of_a_test_on_one_backend(request, monkeypatch):
    conftest = request.config.pluginmanager.getplugin(str(ROOT / "tests" / "conftest.py"))
    items = [item for item in request.session.items if not item.get_closest_marker("theano_only")]
    here = list(map(conftest.is_of_this_backend, items))
    monkeypatch.setattr(conftest, "on_theano", not conftest.on_theano)
    there = list(map(conftest.is_of_this_backend, items))
    for item, is_here, is_there in zip(items, here, there):
        on_one = conftest.alternates(item)
        assert (is_here, is_there) in ([(True, False), (False, True)] if on_one else [(True, True)]), item


def test_ci_runs_each_test_file_on_a_backend():
    everywhere = {path for path, *_ in left_out("theano-only")} & {path for path, *_ in left_out("pytensor-only")}
    assert not everywhere
    assert not [path for path, test, _ in left_out("long") if test is None]
