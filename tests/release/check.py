"""Build what is committed as a release, and use it where no source tree is on the path.

``make release-check`` runs it. The dependencies are those of the interpreter that runs it; the
package itself is installed into an empty environment, from the wheel alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from subprocess import PIPE, STDOUT
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from hatch_build import HOME  # noqa: E402

VERSION = "9.8.7"
WHEEL = f"calibrant-{VERSION}-py3-none-any.whl"
WRITTEN = "src/calibrant/_version.py"  # by the build
METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")


def output_of(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command in this folder with none of our Python variables; return what it prints."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words, environment = [str(word) for word in command], bare | variables
    done = subprocess.run(words, cwd=cwd, env=environment, stdout=PIPE, stderr=STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}")
    return done.stdout


def tagged_clone(folder: Path) -> Path:
    """Clone what is committed, and tag it; beside it lie files that must not be published."""
    clone = folder / "clone"
    output_of("git", "clone", "--quiet", ROOT, clone, cwd=folder)
    output_of("git", "tag", f"v{VERSION}", cwd=clone)
    for name in ("notes.txt", "predictions.npz", "runs/calibrant.safetensors"):
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).write_text("not committed")
    return clone


def build(tree: Path, out: Path, *kinds: str) -> None:
    """Build a tree with the tools of this interpreter; without kinds, the wheel from the sdist."""
    tool = (sys.executable, "-m", "build", "--no-isolation")
    output_of(*tool, *kinds, "--outdir", out, tree, cwd=tree)


def check_contents(committed: set[str], dist: Path) -> None:
    """The sdist has all that is committed, the wheel the package and nothing else."""
    with tarfile.open(dist / f"calibrant-{VERSION}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    expect(names, committed | {WRITTEN, "PKG-INFO"}, "sdist")
    package = {name for name in committed | {WRITTEN} if name.startswith("src/calibrant/")}
    metadata = {f"calibrant-{VERSION}.dist-info/{name}" for name in METADATA}
    names = set(zipfile.ZipFile(dist / WHEEL).namelist())
    expect(names, {name.removeprefix("src/") for name in package} | metadata, "wheel")


def expect(names: set[str], wanted: set[str], what: str) -> None:
    """Stop where a file is missing or should not be there."""
    if names != wanted:
        missing, extra = sorted(wanted - names), sorted(names - wanted)
        raise SystemExit(f"the {what} misses {missing}, and has {extra} beside what it should")


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel into an empty environment that finds our dependencies; its programs."""
    venv.create(folder, with_pip=False)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    python = Path(paths["scripts"]) / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index")
    output_of(*pip, "--no-deps", "--disable-pip-version-check", wheel, cwd=folder)
    # A path file adds the folder of our packages, but not the path files in it: no source tree.
    Path(paths["purelib"], "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Path(paths["scripts"])


def main() -> None:
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        clone, dist, elsewhere = tagged_clone(folder), folder / "dist", folder / "elsewhere"
        committed = set(output_of("git", "ls-files", cwd=clone).splitlines())
        build(clone, dist)
        build(clone, folder / "direct", "--wheel")
        if (dist / WHEEL).read_bytes() != (folder / "direct" / WHEEL).read_bytes():
            raise SystemExit("the wheel from the sdist differs from that of the tree")
        check_contents(committed, dist)

        elsewhere.mkdir()
        programs = install(dist / WHEEL, folder / "environment")
        expected = f"calibrant, version {VERSION}\n"
        assert output_of(programs / "calibrant", "--version", cwd=elsewhere) == expected
        with tarfile.open(dist / f"calibrant-{VERSION}.tar.gz") as sdist:
            sdist.extractall(elsewhere, filter="data")
        source = elsewhere / f"calibrant-{VERSION}" / "src"  # neither installed nor under git
        module = (sys.executable, "-m", "calibrant", "--version")
        assert output_of(*module, cwd=elsewhere, PYTHONPATH=str(source)) == expected
        python = programs / "python"
        shutil.copy(Path(__file__).with_name("user.py"), elsewhere)
        output_of(python, "user.py", VERSION, cwd=elsewhere)
        mypy = (sys.executable, "-m", "mypy", "--strict", "--config-file=", "user.py")
        output_of(*mypy, "--python-executable", python, cwd=elsewhere)
    print("the wheel and the sdist are complete, and work where they are installed")
    if not HOME:
        print("hatch_build.HOME is empty: the package page has neither links nor pictures")


if __name__ == "__main__":
    main()
