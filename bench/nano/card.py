"""The model card and the loss plot, rendered from what training measured. Knows no tensor."""

from pathlib import Path


def write(folder: Path) -> None:
    (folder / "README.md").write_text(
        "# nano\n\n```json\n" + (folder / "training.json").read_text() + "```\n"
    )
