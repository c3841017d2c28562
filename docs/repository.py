"""What mkdocs shows of the repository beyond docs/pages: pages that are next to their subject, pictures, sources.

A hook of mkdocs (see mkdocs.yml). A line `::: dualops.cuda.*` becomes one for each public function of the package.
Links in pages are those of the repository, so that they lead on wherever a page is read; here each is turned to what
the site has for the file that it names. Of a source or a folder that a page links to, the site has a page too.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OWN = ROOT / "docs" / "pages"
PAGES = {
    "README.md": "index.md",  # the site has a front page of its own
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
PAGES |= {  # those that teach
    page.relative_to(ROOT).as_posix(): f"kernels/{page.parent.name}.md"
    for page in (*ROOT.glob("dualops/cuda/*/README.md"), ROOT / "dualops/estimate/README.md")
}
PAGES |= {  # for contributors
    page.relative_to(ROOT).as_posix(): f"contributing/{page.stem}.md" for page in ROOT.glob("docs/*.md")
}
PAGES |= {  # logs of what was measured
    page.relative_to(ROOT).as_posix(): f"measurements/{page.stem}.md" for page in ROOT.glob("docs/measurements/*.md")
}
EVERY = re.compile(r"^::: ([\w.]+)\.\*$", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()[^)#\s:]+(?=[)#])")
OF_SOURCES = "---\nsearch:\n  exclude: true\n---\n\n# {}\n\n"


def on_files(files: Files, *, config: Any) -> None:
    """Add the pages, then all that pages link to."""
    for path, uri in PAGES.items():
        if not files.get_file_from_path(uri):
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for page in list(files.documentation_pages()):
        place = Path(page.abs_src_path or ROOT)
        for link in LINK.findall(page.content_string):
            for path in wanted(place.parent / link):
                uri = uri_of(path)
                if files.get_file_from_path(uri):
                    continue
                if path.suffix == ".png":
                    files.append(File.generated(config, uri, abs_src_path=str(path)))
                else:
                    files.append(File.generated(config, uri, content=source_page(path)))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Name the functions of a package, where a page asks for them; turn the links of a page of the repository."""
    markdown = EVERY.sub(lambda package: "\n\n".join(f"::: {name}" for name in public(package[1])), markdown)
    if not page.file.abs_src_path:
        return markdown
    folder, here = Path(page.file.abs_src_path).parent, posixpath.dirname(page.file.src_uri)

    def turned(link: re.Match[str]) -> str:
        path = (folder / link[0]).resolve()
        return posixpath.relpath(uri_of(path), here or ".") if path.exists() else link[0]

    return LINK.sub(turned, markdown)


def public(package: str) -> Iterator[str]:
    """What a package's `__all__` has of its own modules, by where it imports it from. Read, not imported."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text("utf-8"))
    (named,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            yield from (f"{package}.{node.module}.{alias.name}" for alias in node.names if alias.name in named)


def wanted(target: Path) -> Iterator[Path]:
    """Yield the files that the site needs for a link to a file, or to a folder and its sources; none if missing."""
    target = target.resolve()
    if target.is_dir():
        yield from sorted(target.glob("*.py"))
    if target.exists():
        yield target


def uri_of(path: Path) -> str:
    """The site's place for a file or folder of the repository."""
    if path.is_relative_to(OWN):
        return path.relative_to(OWN).as_posix()
    own = path.relative_to(ROOT).as_posix()
    if path.suffix == ".png":
        return f"pictures/{path.name}"
    return PAGES.get(own) or f"source/{own}/index.md"


def source_page(path: Path) -> str:
    """A file with its lines numbered; of a folder its modules, with the first line of what they say of themselves."""
    head = OF_SOURCES.format(path.relative_to(ROOT))
    if path.is_dir():
        rows = (f"| [`{module.name}`]({module.name}/index.md) | {summary(module)} |\n" for module in path.glob("*.py"))
        return head + "| module | |\n| --- | --- |\n" + "".join(sorted(rows))
    return head + f'``````{path.suffix[1:]} linenums="1"\n{path.read_text("utf-8")}``````\n'


def summary(module: Path) -> str:
    """The first paragraph of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(module.read_text("utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("|", "\\|")
