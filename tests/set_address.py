"""Write the repository's address and version into every badge, link and install line: `make address [URL=https://...]`.

Both stand in pyproject.toml; with a URL that file is changed first.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    "README.md",
    "action.yml",
    "docs/how_do_i.md",
    "docs/memory_in_ci.md",
    "CONTRIBUTING.md",
    "CITATION.cff",
    "notebooks/*.ipynb",
    ".github/**/*.yml",
    ".github/**/*.md",
)
SLUG, REF = r"[\w.-]+/[\w.-]+?", r"[\w.-]+"
# Where a course like this one writes its own address, and nobody else's.
PLACES = (
    rf"(colab\.research\.google\.com/github/)(?P<slug>{SLUG})(/blob/)(?P<ref>{REF})(/notebooks/)",
    rf"(//github\.com/)(?P<slug>{SLUG})(/blob/)(?P<ref>{REF})(/benchmarks/)",
    rf"(mybinder\.org/v2/gh/)(?P<slug>{SLUG})(/)(?P<ref>{REF})(\?)",
    rf"(llamem[^\"']* @ git\+https://github\.com/)(?P<slug>{SLUG})(@)(?P<ref>{REF})(\\?[\"'])",
    rf"(git clone https://github\.com/)(?P<slug>{SLUG})(?P<ref>)(\s|\.git)",
    rf"(uses: )(?P<slug>{SLUG})(@)(?P<ref>v0[\w.-]*)(\s)",  # of our own versions: actions of others have later ones
    rf"(repository-code: \"?https://github\.com/)(?P<slug>{SLUG})(?P<ref>)(\"?\n)",
    rf"(https://github\.com/)(?P<slug>{SLUG})(?P<ref>)(/(?:actions/workflows|issues)\b(?!/\d)|#notebooks)",
    r"(https://)(?P<owner>[\w-]+)(\.github\.io/)(?P<name>[\w.-]+)(/can_i_train_it\.html)",
)


def address(root: Path) -> tuple[str, str]:
    """Owner and name of the repository, and the tag of the version, from pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return _slug(project["urls"]["Repository"]), f"v{project['version']}"


def _slug(url: str) -> str:
    match = re.fullmatch(rf"https://github\.com/({SLUG})(\.git)?/?", url)
    if not match:
        raise SystemExit(f"{url!r} is no address of a repository; it must look like https://github.com/OWNER/NAME.")
    return match[1]


def rewrite(text: str, slug: str, tag: str) -> str:
    """The text with this address and tag in every known place."""

    owner, name = slug.split("/")
    values = {"slug": slug, "ref": tag, "owner": owner, "name": name}

    def replace(match: re.Match) -> str:
        parts, at = [], match.start()
        for group, old in match.groupdict().items():
            if old:
                parts += [match.string[at : match.start(group)], values[group]]
                at = match.end(group)
        return "".join([*parts, match.string[at : match.end()]])

    for place in PLACES:
        text = re.sub(place, replace, text)
    return text


def main(root: Path, url: str | None = None) -> None:
    """Rewrite every file in place, and print which changed."""
    if url:
        project = root / "pyproject.toml"
        old = project.read_text(encoding="utf-8")
        project.write_text(re.sub(r'(?m)^Repository = ".*"$', f'Repository = "https://github.com/{_slug(url)}"', old))
    slug, tag = address(root)
    for path in sorted(path for pattern in FILES for path in root.glob(pattern)):
        old = path.read_text(encoding="utf-8")
        new = rewrite(old, slug, tag)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(f"{path.relative_to(root)}: {slug} {tag}")


if __name__ == "__main__":
    main(ROOT, *sys.argv[1:])
