"""The addresses of the service."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

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

PAGE = Path(__file__).parent / "page"
# The first that fits decides; any other error of ours is the request's own fault.
_STATUS: tuple[tuple[type[EfcilError], int], ...] = (
    (LimitExceeded, 413),
    (Overloaded, 503),
    (Conflict, 409),
    (JobNotFound, 404),
    (ClassNotFound, 404),
    (EfcilError, 400),
)
_MEANING = {
    400: "What was sent cannot be used.",
    401: "The token is missing or wrong.",
    404: "There is no such thing.",
    408: "The client fell silent in the middle of its request.",
    409: "Not now: the model is being changed, or there is nothing to do it with.",
    413: "More bytes, files or entries than the limits allow.",
    415: "The body has another type.",
    422: "A parameter or field is missing or wrong.",
    503: "Too many pictures are waiting.",
}


def _errors(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": Error, "description": _MEANING[code]} for code in codes}


_BEARER = HTTPBearer(auto_error=False, description="The token that `efcil serve` was given or has printed.")
_BODY = (408, 413, 415, 422)  # what can be wrong with any body
_BINARY = {"type": "string", "format": "binary"}


def _body(**content: Any) -> dict[str, Any]:
    kinds = {"json": "application/json", "form": "multipart/form-data"}
    return {"requestBody": {"required": True, "content": {kinds[k]: {"schema": v} for k, v in content.items()}}}


def _form(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


_FILES = {"type": "array", "minItems": 1, "items": _BINARY}
_PREDICT_FORM = _form(["files"], files=_FILES)
_TEACH_INPUTS: tuple[dict[str, Any], ...] = (  # what is taught
    {"archive": {**_BINARY, "description": "A zip: one folder of pictures for each class."}},
    {"label": {"type": "string", "minLength": 1, "description": "The name of the class."}, "files": _FILES},
)
_TEACH_EFFORT: tuple[dict[str, Any], ...] = (  # how hard: one of the two, or neither
    {"epochs": {"type": "integer", "minimum": 1, "maximum": 10_000, "description": "Passes over the pictures."}},
    {"budget": {"type": "number", "minimum": 0.1, "maximum": 86_400, "description": "Seconds it may take."}},
)
_TEACH_FORM = {"anyOf": [_form(list(sent), **sent, **effort) for sent in _TEACH_INPUTS for effort in _TEACH_EFFORT]}
_DESCRIPTION = (
    "A classifier that is taught again and again. What writes needs the header `Authorization: Bearer TOKEN`. "
    'Every error is `{"detail": text}`. One change of the model at a time: others are refused with 409, not queued.'
)


def create_app(service: Service, token: str) -> FastAPI:
    """Make the application; `token` is wanted from everything that writes."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="efcil", version=__version__, description=_DESCRIPTION, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.add_middleware(Guard, limits=service.limits, metrics=service.metrics)
    _handle_errors(app)
    _add_reading(app, service)
    _add_writing(app, service, token)
    _add_page(app)
    return app


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(EfcilError)
    async def efcil_error(request: Request, error: EfcilError) -> JSONResponse:
        status = next(code for kind, code in _STATUS if isinstance(error, kind))
        headers = {"Retry-After": "1"} if status == 503 else None
        return JSONResponse({"detail": str(error)}, status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": forms.format_errors(error.errors())}, 422)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "internal error; see the service's log"}, 500)


def _model(service: Service) -> Model:
    now = service.store.current
    return Model(classes=len(now.names), method=str(now.summary["method"]), version=now.version)


def _add_reading(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["state"])
    async def health() -> Health:
        """Say that the service answers, and what with."""
        job = service.jobs.running
        return Health(status="ok", model=_model(service), job=job.id if job else None)

    @app.get("/classes", tags=["state"])
    async def classes() -> Classes:
        """List the classes with counts, dates and recall, and the pairs that are closest to each other."""
        summary = service.store.current.summary
        return Classes.model_validate({key: summary[key] for key in ("classes", "similar")})

    @app.get("/metrics", tags=["state"], response_class=PlainTextResponse)
    async def counts() -> PlainTextResponse:
        """Return counters and times in Prometheus' text format."""
        return PlainTextResponse(service.metrics.text(), media_type=metrics.CONTENT_TYPE)

    @app.post(
        "/predict",
        tags=["answers"],
        response_model=Predictions,
        responses={
            400: {
                "model": Predictions | Error,
                "description": "No picture could be read (the reasons are in `predictions`), or the form is damaged.",
            },
            **_errors(409, 503, *_BODY),
        },
        openapi_extra=_body(form=_PREDICT_FORM, json=Images.model_json_schema()),
    )
    async def predict(
        request: Request,
        top: Annotated[int, Query(ge=1, le=1000, description="How many classes to name.")] = 3,
        reject_below: Annotated[float | None, Query(ge=0, le=1, description="Least confidence for a label.")] = None,
    ) -> JSONResponse:
        """Name the class of each picture. A picture that cannot be read has an entry with `error` instead."""
        async with forms.read_images(request, service.limits) as images:
            found = await service.predict(images, top, reject_below)
        readable = any("error" not in answer for answer in found)
        return JSONResponse({"predictions": found}, 200 if readable else 400)

    @app.get("/jobs", tags=["teaching"])
    async def jobs() -> JobList:
        """List the teachings of this service, the newest first."""
        return JobList.model_validate({"jobs": [job.to_dict() for job in service.jobs.list()]})

    @app.get("/jobs/{id}", tags=["teaching"], responses=_errors(404, 422))
    async def job(id: str) -> JobState:
        """Say how far a teaching is."""
        return JobState.model_validate(service.jobs.find(id).to_dict())


def _add_writing(app: FastAPI, service: Service, token: str) -> None:
    async def allowed(given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> None:
        said = given.credentials if given else ""
        if not hmac.compare_digest(said.encode("utf-8", "surrogateescape"), token.encode()):
            what = "the token is wrong" if given else "this needs a token"
            headers = {"WWW-Authenticate": "Bearer"}
            raise HTTPException(401, f"{what}: send the header 'Authorization: Bearer TOKEN'", headers)

    def writing(*codes: int) -> dict[str, Any]:
        return {"tags": ["teaching"], "dependencies": [Depends(allowed)], "responses": _errors(401, *codes)}

    @app.post("/teach", status_code=202, **writing(400, 409, *_BODY), openapi_extra=_body(form=_TEACH_FORM))
    async def teach(request: Request) -> Started:
        """Start to teach: a zip of class folders, or pictures of one class, new or known.

        The answer names the files that are left out. The model that answers changes when the job is done. While one
        teaching runs another is refused (409).
        """
        service.store.check_free()
        known = service.store.current.names
        async with forms.read_teaching(request, service.store.size, service.limits, known) as teaching:
            job, upload = await service.teach(teaching.upload, teaching.epochs, teaching.budget)
        refused = [{"file": name, "error": why} for name, why in upload.refused]
        return Started.model_validate(
            {"job": job.id, "classes": job.classes, "images": len(upload.labels), "refused": refused}
        )

    @app.post("/jobs/{id}/cancel", **writing(404, 409, 422))
    async def cancel(id: str) -> JobState:
        """End a teaching; the model stays as it was."""
        return JobState.model_validate((await service.jobs.cancel(id)).to_dict())

    @app.post("/forget", **writing(404, 409, *_BODY), openapi_extra=_body(json=Names.model_json_schema()))
    async def forget(request: Request) -> Forgotten:
        """Drop classes: what is stored of them, and their rows in the classifier."""
        names = list(dict.fromkeys((await forms.json_body(request, Names)).classes))
        await service.forget(names)
        return Forgotten(forgotten=names)

    @app.post("/undo", **writing(409))
    async def undo() -> Undone:
        """Go back to the model before its last change."""
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
