"""The `longreach` command, and `python -m longreach`. The order matters: what is imported comes after `safe_path`."""

from longreach.util import safe_path


def main() -> None:
    """Entry point of the console script."""
    safe_path.hold()
    from longreach.cli import main as command

    command()


if __name__ == "__main__":
    safe_path.drop_main_folder()
    main()
