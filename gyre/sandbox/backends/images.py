"""Images of tasks: used if they are there, else fetched by name or built from a Dockerfile; once, and kept.

Invariants
- A built image is called after what it was built from, so that a change makes another and nothing is built twice.
- Whoever stops waiting does not stop the making: others wait for it too.
- A name that no registry knows, or a Dockerfile that cannot be read, is the task's fault. What fails while it is fetched or built is not: a
  network that is away must not become a reward of 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from pathlib import Path
from typing import Any, Final

import msgspec
from docker.errors import APIError, BuildError, DockerException, ImageNotFound, NotFound

from gyre.errors import DeadlineExceeded
from gyre.sandbox.backends.base import WORK, Image, InfraSetupFailed, TaskSetupFailed

REPOSITORY: Final = "gyre-task"
LABEL: Final = "gyre.image"


class Found(msgspec.Struct, frozen=True):
    """An image that can be used."""

    id: str
    place: str  # its working directory
    volumes: list[str]  # places that it declares as volumes: nothing would bound them


class Images:
    """The images of one daemon."""

    def __init__(self, client: Any, default: str) -> None:
        self._client = client
        self._default = default
        self._making: dict[Image, asyncio.Task[Found]] = {}

    async def get(self, image: Image) -> Found:
        """`TaskSetupFailed`, `InfraSetupFailed`, `DeadlineExceeded`."""
        making = self._making.get(image)
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = self._making[image] = asyncio.create_task(asyncio.to_thread(self._make, image))
        try:
            return await asyncio.wait_for(asyncio.shield(making), image.timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the image {image.name or image.context} to be made", image.timeout_s) from None

    def _make(self, image: Image) -> Found:
        try:
            by_name = image.name or not image.context
            found = self._named(image.name or self._default) if by_name else self._built(Path(image.context))
        except BuildError as e:
            raise InfraSetupFailed(f"{image.context}/Dockerfile cannot be built: {e.msg}") from None
        except (DockerException, OSError) as e:
            raise InfraSetupFailed(f"the image cannot be had: {e}") from None
        config = found.attrs["Config"]
        place = config.get("WorkingDir") or ""
        return Found(found.id, place if place.strip("/") else WORK, sorted(config.get("Volumes") or {}))

    def _named(self, name: str) -> Any:
        if not name:
            raise InfraSetupFailed("the task names no image and has no Dockerfile, and sandbox.image is empty")
        try:
            return self._client.images.get(name)
        except ImageNotFound:
            pass
        try:
            events = list(self._client.api.pull(name, stream=True, decode=True))
        except NotFound as e:
            raise TaskSetupFailed(f"no image {name!r}: {e.explanation}") from None
        if said := [event["error"] for event in events if "error" in event]:
            raise InfraSetupFailed(f"the image {name!r} cannot be fetched: {said[-1]}")
        return self._client.images.get(name)

    def _built(self, context: Path) -> Any:
        name = f"{REPOSITORY}:{digest(context)[:20]}"
        try:
            return self._client.images.get(name)
        except ImageNotFound:
            pass
        try:
            return self._client.images.build(path=str(context), tag=name, rm=True, forcerm=True, labels={LABEL: "task"})[0]
        except APIError as e:
            if e.response is not None and 400 <= e.response.status_code < 500:
                raise TaskSetupFailed(f"{context}/Dockerfile: {e.explanation}") from None
            raise


def digest(context: Path) -> str:
    """What a directory is made of: names, modes and contents, nothing else."""
    total = hashlib.sha256()
    for folder, below, files in os.walk(context):
        below.sort()
        for path in sorted(Path(folder, name) for name in [*files, *below]):
            mode = path.lstat().st_mode
            total.update(f"{path.relative_to(context)}\0{mode:o}\0".encode(errors="surrogateescape"))
            if stat.S_ISLNK(mode):
                total.update(os.fsencode(path.readlink()))
            elif stat.S_ISREG(mode):
                with path.open("rb") as f:
                    total.update(hashlib.file_digest(f, "sha256").digest())
    return total.hexdigest()
