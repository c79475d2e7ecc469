"""The routes of files: what batches read and what they have written."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, NoReturn

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from jaxinfer.http.batch_store import BatchStore, new_id
from jaxinfer.http.bodies import json_response
from jaxinfer.http.errors import HttpError

MAX_FILE_BYTES = 512 * 2**20
"""Largest file, as the OpenAI API has it."""
MAX_FORM_FIELDS = 8
DEFAULT_LIMIT, MAX_LIMIT = 20, 100
"""Entries of one page of a list."""
COPY_BYTES = 2**20


def file_routes(store: BatchStore) -> list[Route]:
    """Upload, list, show, delete and read."""
    files = _Files(store)
    return [
        Route("/v1/files", files.upload, methods=["POST"]),
        Route("/v1/files", files.list, methods=["GET"]),
        Route("/v1/files/{id}", files.show, methods=["GET"]),
        Route("/v1/files/{id}", files.delete, methods=["DELETE"]),
        Route("/v1/files/{id}/content", files.content, methods=["GET"]),
    ]


class _Files:
    def __init__(self, store: BatchStore):
        self._store = store

    async def upload(self, request: HttpRequest) -> Response:
        size = request.headers.get("content-length", "")
        if not size.isdecimal():
            raise HttpError(411, "Content-Length is missing: the size of a file is checked first", code="no_length")
        if int(size) > MAX_FILE_BYTES:
            message = f"the body has {size} bytes; at most {MAX_FILE_BYTES} are read"
            raise HttpError(413, message, code="request_too_large")
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "multipart/form-data":
            message = f"Content-Type is {kind!r}; it must be multipart/form-data"
            raise HttpError(415, message, code="unsupported_media_type")
        try:
            async with request.form(max_files=1, max_fields=MAX_FORM_FIELDS) as form:
                file, purpose = form.get("file"), form.get("purpose")
                if not isinstance(file, UploadFile):
                    refuse("file is missing", param="file")
                if purpose != "batch":
                    refuse(f"purpose is {purpose!r}; 'batch' is supported", param="purpose")
                fields = await asyncio.to_thread(self._keep, file)
        except (HTTPException, MultiPartException) as error:
            message = getattr(error, "detail", None) or getattr(error, "message", str(error))
            refuse(f"the form cannot be read: {message}")
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        return json_response(fields)

    def _keep(self, file: UploadFile) -> dict[str, Any]:
        """Takes it once it is whole and on the disk."""
        unnamed = self._store.content(new_id("upload-"))
        try:
            with unnamed.open("wb") as kept:
                while block := file.file.read(COPY_BYTES):
                    kept.write(block)
                kept.flush()
                os.fsync(kept.fileno())
            return self._store.add_file(unnamed, file.filename or "batch.jsonl", "batch")
        except OSError as error:
            message = f"the file cannot be kept: {error.strerror}"
            raise HttpError(507, message, code="no_room") from error
        finally:
            unnamed.unlink(missing_ok=True)

    async def list(self, request: HttpRequest) -> Response:
        after, limit = page_of(request)
        return list_response(self._store.files(after, limit, request.query_params.get("purpose")), limit)

    async def show(self, request: HttpRequest) -> Response:
        return json_response(self._found(request))

    async def delete(self, request: HttpRequest) -> Response:
        file_id = self._found(request)["id"]
        self._store.remove_file(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: HttpRequest) -> Response:
        path: Path = self._store.content(self._found(request)["id"])
        return FileResponse(path, media_type="application/octet-stream")

    def _found(self, request: HttpRequest) -> dict[str, Any]:
        file_id = request.path_params["id"]
        fields = self._store.file(file_id)
        if fields is None:
            raise HttpError(404, f"there is no file {file_id!r}", code="file_not_found", param="id")
        return fields


def page_of(request: HttpRequest) -> tuple[str | None, int]:
    """After which entry, and how many, a list is asked for."""
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:6]) <= MAX_LIMIT):
        refuse(f"limit is {text!r}; it must be from 1 to {MAX_LIMIT}", param="limit")
    return request.query_params.get("after"), int(text)


def list_response(found: list[dict[str, Any]], limit: int) -> Response:
    """A page; `found` has one more if there are more."""
    shown = found[:limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": shown, **ends, "has_more": len(found) > limit})


def refuse(message: str, *, param: str | None = None, code: str = "invalid_value") -> NoReturn:
    raise HttpError(400, message, code=code, param=param)
