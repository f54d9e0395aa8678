"""A tool, called as its command."""


def call(tool, capsys, *args):
    """Its exit code, its output and its errors."""
    try:
        code = tool.main(tool.parse_args([*map(str, args)])) or 0
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()
