import pytest

from smoe_cli import sizes
from smoe_cli.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1K", 1024),
        ("8g", 8 << 30),
        ("1.5G", 3 << 29),
        ("2T", 2 << 40),
        ("512MiB", 512 << 20),
        ("7 GB", 7 << 30),
    ],
)
def test_sizes_are_powers_of_1024(text: str, size: int) -> None:
    assert sizes.parse(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "1e3", "8 X", "nan", "0.0001K"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        sizes.parse(text)


@pytest.mark.parametrize(
    ("size", "text"), [(812, "812 B"), (46 << 30, "46.0 GB"), (3 << 40, "3.0 TB"), (1536, "1.5 KB")]
)
def test_shown_for_people(size: int, text: str) -> None:
    assert sizes.show(size) == text
