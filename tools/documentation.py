"""What `make docs` adds to the Markdown in docs/, as hooks of MkDocs: the pages of the repository's first folder, the reference
that tools/make_reference.py wrote, a page for every public module of the package, and the navigation, grouped as the table in
README.md groups it. Nothing of it is kept in git."""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "build" / "reference"
FIRST = {"README.md": "index.md", "CHANGELOG.md": "changes.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}  # fmt: skip
"""Pages of the repository's first folder -> their place in the site."""
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)]*)?(\))")


def modules() -> dict[str, Path]:
    """Dotted name -> file, of the package's public modules and packages."""
    found = {}
    for file in sorted((ROOT / "src").rglob("*.py")):
        parts = file.relative_to(ROOT / "src").with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts):
            found[".".join(parts)] = file
    return found


def beside() -> dict[str, str]:
    """Pages that lie beside what they are about, as of experiments and samples -> their place in the site."""
    files = (file for folder in ("experiments", "src") for file in sorted((ROOT / folder).rglob("*.md")))
    return {(name := file.relative_to(ROOT).as_posix()): f"more/{name}" for file in files}


def place(file: str) -> str | None:
    """Where the site has a file of the repository; None: nowhere."""
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    for name, module in modules().items() if file.startswith("src/") else ():
        if module == ROOT / file:
            return f"api/{name}.md"
    return (FIRST | beside()).get(file)


def relinked(text: str, origin: str, here: str) -> str:
    """The text of the repository's page `origin` with its links as they lead from `here` in the site. A link to what the
    site does not have stays; MkDocs then names it."""

    def led(found: re.Match[str]) -> str:
        start, target, anchor, end = found.groups()
        there = place(posixpath.normpath(posixpath.join(posixpath.dirname(origin), target)))
        if ":" in target or there is None:
            return found[0]
        return f"{start}{posixpath.relpath(there, posixpath.dirname(here) or '.')}{anchor or ''}{end}"

    return LINK.sub(led, text)


def groups() -> dict[str, dict[str, str]]:
    """Group of the table in README.md -> title of a page -> its place in the site."""
    section = (ROOT / "README.md").read_text().partition("\n## Documentation\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| \*\*(.+?)\*\*[^|]*\| (.*) \|$", section, re.M)
    made = {}
    for group, cell in rows:
        links = re.findall(r"\[([^\]]+)\]\(([^)#]+)\)", cell)
        if pages := {title: there for title, file in links if (there := place(file))}:
            made[group] = pages
    return made


def nested(names: list[str]) -> list[Any]:
    """Pages of modules, with those of a package under it."""
    top = names[0].partition(".")[0]

    def inside(package: str) -> list[Any]:
        made: list[Any] = []
        for name in names:
            if name.rpartition(".")[0] == package:
                short, below = name.rpartition(".")[2], inside(name)
                page = {short: f"api/{name}.md"}
                made.append({short: [page, *below]} if below else page)
        return made

    return [{top: f"api/{top}.md"}, *inside(top)]


def navigation(reference: list[str]) -> list[Any]:
    """The site's navigation; `reference` are places of the pages that were made from the code."""
    made: list[Any] = [{"FedAtlas": "index.md"}]
    for group, pages in groups().items():
        entries: list[Any] = [{title: there} for title, there in pages.items()]
        if group == "Reference":
            entries[1:1] = reference
            entries += [{"Contributing": "contributing.md"}, {"Security": "security.md"}]
            entries.append({"Python": nested([*modules()])})
        made.append({group: entries})
    return made


def on_config(config: Any) -> Any:
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")  # as hosted Git pages do
    config.nav = navigation([f"reference/{page.name}" for page in sorted(REFERENCE.glob("*.md"))])
    return config


def on_files(files: Any, *, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name, there in (FIRST | beside()).items():
        text = relinked((ROOT / name).read_text(), name, there)
        files.append(File.generated(config, there, content=text))
    for page in REFERENCE.glob("*.md"):
        files.append(File.generated(config, f"reference/{page.name}", content=page.read_text()))
    for name in modules():
        files.append(File.generated(config, f"api/{name}.md", content=f"::: {name}\n"))
    return files


def on_page_markdown(markdown: str, *, page: Any, **others: Any) -> str:
    if page.file.generated_by is None:  # a page of docs/
        markdown = relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
    if page.file.src_uri == "reference/index.md":
        made = sorted(REFERENCE.glob("*.md"))
        links = [f"* [{file.read_text().partition(chr(10))[0].strip('# ')}]({file.name})" for file in made]
        markdown += "\n".join(["", "## Pages", "", *links, ""])
    return markdown
