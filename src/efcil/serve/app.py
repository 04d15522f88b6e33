"""HTTP routes of the service."""

from __future__ import annotations

import asyncio
import errno
import hmac
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles

from efcil import __version__
from efcil.errors import EfcilError
from efcil.serve import forms, metrics
from efcil.serve.archive import LimitExceeded
from efcil.serve.batching import Overloaded
from efcil.serve.guard import Guard
from efcil.serve.images import public
from efcil.serve.jobs import JobNotFound
from efcil.serve.reference import reference_page
from efcil.serve.schemas import (
    Classes,
    Error,
    Forgotten,
    Health,
    Images,
    JobList,
    JobState,
    Model,
    Names,
    Predictions,
    Started,
    Undone,
)
from efcil.serve.service import ClassNotFound, Service
from efcil.serve.store import Conflict

T = TypeVar("T")
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE}
PAGE = Path(__file__).parent / "page"
# First match decides; other EfcilErrors are client errors.
_STATUS: tuple[tuple[type[EfcilError], int], ...] = (
    (LimitExceeded, 413),
    (Overloaded, 503),
    (Conflict, 409),
    (JobNotFound, 404),
    (ClassNotFound, 404),
    (EfcilError, 400),
)
_MEANING = {
    400: "The request body is invalid.",
    401: "The token is missing or wrong.",
    404: "Not found.",
    408: "The client stopped sending its request.",
    409: "Conflict: the model is being changed, or its state does not allow the operation.",
    413: "The request exceeds the limits on bytes, files or entries.",
    415: "Unsupported content type.",
    422: "A parameter or field is missing or invalid.",
    503: "Too many images are queued, or too many bytes are held.",
}


def _errors(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": Error, "description": _MEANING[code]} for code in codes}


_BEARER = HTTPBearer(auto_error=False, description="The token passed to or printed by `efcil serve`.")
_BODY = (400, 408, 413, 415, 422, 503)  # errors of any request body
_BINARY = {"type": "string", "format": "binary"}


def _body(**content: Any) -> dict[str, Any]:
    kinds = {"json": "application/json", "form": "multipart/form-data"}
    return {"requestBody": {"required": True, "content": {kinds[k]: {"schema": v} for k, v in content.items()}}}


def _form(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


_FILES = {"type": "array", "minItems": 1, "items": _BINARY}
_PREDICT_FORM = _form(["files"], files=_FILES)
_TEACH_INPUTS: tuple[dict[str, Any], ...] = (  # images to learn
    {"archive": {**_BINARY, "description": "A zip file with one folder of images per class."}},
    {"label": {"type": "string", "minLength": 1, "description": "Class name."}, "files": _FILES},
)
_TEACH_EFFORT: tuple[dict[str, Any], ...] = (  # training effort: at most one of the two
    {"epochs": {"type": "integer", "minimum": 1, "maximum": 10_000, "description": "Epochs over the images."}},
    {"budget": {"type": "number", "minimum": 0.1, "maximum": 86_400, "description": "Time limit in seconds."}},
)
_TEACH_FORM = {"anyOf": [_form(list(sent), **sent, **effort) for sent in _TEACH_INPUTS for effort in _TEACH_EFFORT]}
_DESCRIPTION = (
    "An incremental image classifier. Write operations need the header `Authorization: Bearer TOKEN`. "
    'Errors are `{"detail": text}`. One change of the model runs at a time; others are refused with 409, not queued.'
)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled when the client has gone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(400, "the client has gone")  # nobody reads this
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


def create_app(service: Service, token: str, hosts: frozenset[str] = frozenset(["localhost"])) -> FastAPI:
    """Create the application; write operations require `token`, and the Host header is an address or one of `hosts`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="efcil",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # such a redirect would go to whatever the Host header names
    )
    app.add_middleware(Guard, limits=service.limits, metrics=service.metrics, hosts=hosts)
    _handle_errors(app, service)
    _add_reading(app, service)
    _add_writing(app, service, token)
    _add_page(app)
    return app


def _handle_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(EfcilError)
    async def efcil_error(request: Request, error: EfcilError) -> JSONResponse:
        status = next(code for kind, code in _STATUS if isinstance(error, kind))
        headers = {"Retry-After": "1"} if status == 503 else None
        return JSONResponse({"detail": public(str(error), str(service.store.directory))}, status, headers)

    @app.exception_handler(OSError)
    async def no_room(request: Request, error: OSError) -> JSONResponse:
        if error.errno not in _NO_ROOM:
            return await unforeseen(request, error)
        return JSONResponse({"detail": "the machine of the service has no room for this; the model is unchanged"}, 507)

    @app.exception_handler(MemoryError)
    async def no_memory(request: Request, error: MemoryError) -> JSONResponse:
        return JSONResponse({"detail": "the service has not enough memory for this; send less at once"}, 507)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": forms.format_errors(error.errors())}, 422)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "internal error; see the service's log"}, 500)


def _model(service: Service) -> Model:
    now = service.store.current
    return Model(
        name=service.store.directory.name,
        classes=len(now.names),
        method=str(now.summary["method"]),
        backbone=str(now.summary["backbone"]),
        size=service.store.size,
        version=now.version,
    )


def _add_reading(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["state"])
    async def health() -> Health:
        """Return the status of the service and its model."""
        job = service.jobs.running
        return Health(status="ok", started=service.started, model=_model(service), job=job.id if job else None)

    @app.get("/classes", tags=["state"])
    async def classes() -> Classes:
        """List the classes with counts, dates and recall, the most similar pairs, and estimated confusions."""
        summary = service.store.current.summary
        return Classes.model_validate({key: summary[key] for key in ("classes", "similar", "confusions")})

    @app.get("/metrics", tags=["state"], response_class=PlainTextResponse)
    async def counts() -> PlainTextResponse:
        """Return metrics in Prometheus text format."""
        return PlainTextResponse(service.metrics.text(), media_type=metrics.CONTENT_TYPE)

    @app.post(
        "/predict",
        tags=["answers"],
        response_model=Predictions,
        responses={
            400: {
                "model": Predictions | Error,
                "description": "No image could be read (reasons in `predictions`), or the form is malformed.",
            },
            **_errors(409, *_BODY[1:]),
        },
        openapi_extra=_body(form=_PREDICT_FORM, json=Images.model_json_schema()),
    )
    async def predict(
        request: Request,
        top: Annotated[int, Query(ge=1, le=1000, description="Number of top classes to return.")] = 3,
        reject_below: Annotated[float | None, Query(ge=0, le=1, description="Minimum confidence for a label.")] = None,
        reject_strange: Annotated[
            float | None, Query(ge=0, le=1, description="Minimum typicality for a label; try 0.05.")
        ] = None,
    ) -> JSONResponse:
        """Classify images. An unreadable image has an entry with `error` instead."""
        images = await forms.read_images(request, service.limits)
        found = await while_connected(request, service.predict(images, top, reject_below, reject_strange))
        readable = any("error" not in answer for answer in found)
        return JSONResponse({"predictions": found}, 200 if readable else 400)

    @app.get("/jobs", tags=["teaching"])
    async def jobs() -> JobList:
        """List the update jobs of this service, newest first."""
        return JobList.model_validate({"jobs": [job.to_dict() for job in service.jobs.list()]})

    @app.get("/jobs/{id}", tags=["teaching"], responses=_errors(404, 422))
    async def job(id: str) -> JobState:
        """Return the progress of an update job."""
        return JobState.model_validate(service.jobs.find(id).to_dict())


def _add_writing(app: FastAPI, service: Service, token: str) -> None:
    async def allowed(given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> None:
        credentials = given.credentials if given else ""
        if not hmac.compare_digest(credentials.encode("utf-8", "surrogateescape"), token.encode()):
            what = "the token is wrong" if given else "a token is required"
            headers = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(401, f"{what}; send the header 'Authorization: Bearer TOKEN'", headers)

    def writing(*codes: int) -> dict[str, Any]:
        return {"tags": ["teaching"], "dependencies": [Depends(allowed)], "responses": _errors(401, *codes)}

    @app.post("/teach", status_code=202, **writing(409, *_BODY), openapi_extra=_body(form=_TEACH_FORM))
    async def teach(request: Request) -> Started:
        """Start an update with a zip of class folders, or with images of one new or existing class.

        The response lists skipped files. Predictions use the new model when the job is done. Other updates are refused
        meanwhile (409).
        """
        service.store.check_free()
        known = service.store.current.names
        teaching = await forms.read_teaching(request, service.limits, known)
        job, upload = await service.teach(teaching.upload, teaching.epochs, teaching.budget)
        refused = [{"file": name, "error": why} for name, why in upload.refused]
        return Started.model_validate(
            {"job": job.id, "classes": job.classes, "images": len(upload.labels), "refused": refused}
        )

    @app.post("/jobs/{id}/cancel", **writing(404, 409, 422))
    async def cancel(id: str) -> JobState:
        """Cancel an update; the model is unchanged."""
        return JobState.model_validate((await service.jobs.cancel(id)).to_dict())

    @app.post("/forget", **writing(404, 409, *_BODY), openapi_extra=_body(json=Names.model_json_schema()))
    async def forget(request: Request) -> Forgotten:
        """Remove classes from statistics and classifier."""
        names = list(dict.fromkeys((await forms.json_body(request, Names)).classes))
        await service.forget(names)
        return Forgotten(forgotten=names)

    @app.post("/undo", **writing(409))
    async def undo() -> Undone:
        """Restore the model before its last change."""
        await service.undo()
        return Undone(model=_model(service))


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(reference_page(app.openapi()))

    app.mount("/page", StaticFiles(directory=PAGE), name="page")
