"""A model by its name on the Hugging Face hub, ``hf:ORG/NAME[@REVISION][:VARIANT]``, as a local path to convert.

The files go to the hub's own cache, where other programs find them too; what is there already is not fetched again, and
a download that was stopped goes on. Small files come first: what cannot be converted is refused before its weights.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from smoe_cli.convert.checkpoint import read_json, shard_names
from smoe_cli.convert.gguf.file import model_of
from smoe_cli.errors import ResourceError, SmoeError, UnsupportedError, UsageError
from smoe_cli.families.spec import match_family
from smoe_cli.sizes import show

PREFIX = "hf:"
NAME = re.compile(r"hf:/{0,2}(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[^:@\s]+))?(?::(?P<variant>[\w./-]+))?")
SMALL = (".json", ".jinja", ".model", ".txt", ".tiktoken")
MOST_SMALL_BYTES = 256 << 20  # a file of such an ending that is larger holds something else


@dataclass(frozen=True)
class HubName:
    repo: str
    revision: str | None = None  # the main branch
    variant: str = ""  # which of several GGUF models: a part of its file's name


@dataclass(frozen=True)
class Listing:
    """What a repository holds at one commit: sizes in bytes by path."""

    repo: str
    commit: str
    sizes: dict[str, int]


def parse(source: str) -> HubName | None:
    """The model that is named; None where the source is a path. UsageError: hf: with anything else behind it."""
    if not source.startswith(PREFIX) or Path(source).exists():
        return None
    found = NAME.fullmatch(source)
    if found is None:
        raise UsageError(
            f"{source} is no name of a model", "write hf:ORG/NAME, hf:ORG/NAME@REVISION, hf:ORG/NAME:Q4_K_M"
        )
    return HubName(found["repo"], found["revision"], found["variant"] or "")


def fetch(name: HubName, notice: Callable[[str], None]) -> Path:
    """The model's files in the cache: a folder, or the (first) GGUF file.

    UsageError: no such model, revision or variant, or one that wants a login. UnsupportedError: a family or format
    that is not converted. ResourceError: no room. SmoeError: the hub cannot be reached.
    """
    with _hub_errors(name):
        listing = _list(name)
        if "config.json" in listing.sizes and any(path.endswith(".safetensors") for path in listing.sizes):
            return _fetch_checkpoint(listing, notice)
        return _fetch_gguf(listing, name, notice)


def _list(name: HubName) -> Listing:
    from huggingface_hub import HfApi

    info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return Listing(name.repo, info.sha or name.revision or "main", sizes)


def _fetch_checkpoint(listing: Listing, notice: Callable[[str], None]) -> Path:
    small = [
        path
        for path, size in listing.sizes.items()
        if "/" not in path and path.endswith(SMALL) and size <= MOST_SMALL_BYTES
    ]
    folder = _download(listing, small)
    match_family(read_json(folder / "config.json"))
    shards = [shard for shard in shard_names(folder) if shard in listing.sizes]
    _fetch_weights(listing, shards, notice)
    return folder


def _fetch_gguf(listing: Listing, name: HubName, notice: Callable[[str], None]) -> Path:
    found = [path for path in listing.sizes if path.endswith(".gguf") and not Path(path).name.startswith("mmproj")]
    if not found:
        raise UnsupportedError(
            f"{name.repo} holds neither safetensors with a config.json nor GGUF files", "name another repository"
        )
    parts = sorted(path for path in found if name.variant.lower() in path.lower())
    models = sorted({model_of(path) for path in parts})
    if len(models) != 1:
        meant = f"has no GGUF called {name.variant!r}" if not models else "holds several GGUF models"
        raise UsageError(
            f"{name.repo} {meant}: {', '.join(models or sorted({model_of(path) for path in found}))}",
            f"name one, as in hf:{name.repo}:Q4_K_M",
        )
    _fetch_weights(listing, parts, notice)
    return _download(listing, parts[:1]) / parts[0]


def _fetch_weights(listing: Listing, paths: list[str], notice: Callable[[str], None]) -> None:
    from huggingface_hub import constants, try_to_load_from_cache

    todo = [p for p in paths if not isinstance(try_to_load_from_cache(listing.repo, p, revision=listing.commit), str)]
    if not todo:
        return
    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    needed, free = sum(listing.sizes[path] for path in todo), shutil.disk_usage(cache).free
    if free < needed:
        raise ResourceError(
            f"{cache} has {show(free)} free, the files of {listing.repo} need {show(needed)}",
            "free some space, or point HF_HOME at another disk",
        )
    notice(f"fetching {len(todo)} files of {listing.repo}, {show(needed)}, to {cache}")
    _download(listing, todo)


def _download(listing: Listing, paths: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(listing.repo, revision=listing.commit, allow_patterns=paths))


@contextmanager
def _hub_errors(name: HubName) -> Iterator[None]:
    """What the hub refuses, and a network that is not there, as members of the error tree."""
    from huggingface_hub import errors

    network: type[Exception] = vars(errors)["HTTPError"]  # of the HTTP library that this version of the hub's uses
    try:
        yield
    except errors.GatedRepoError as error:
        raise UsageError(
            f"{name.repo} is given only to those who accepted its terms",
            "accept them at its page on the hub, then `hf auth login` or HF_TOKEN",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UsageError(
            f"{name.repo} has no revision {name.revision}", "leave @REVISION out for the newest"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"the hub has no model {name.repo}, or it is private", "check the name; for a private one `hf auth login`"
        ) from error
    except (network, errors.XetDownloadError, OSError) as error:
        raise SmoeError(
            f"{name.repo} could not be fetched: {_first_line(error)}",
            "the same command goes on where it was; or fetch the files elsewhere and give their folder",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
