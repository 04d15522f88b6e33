"""What goes in and out, as the OpenAPI description has it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]


class Error(BaseModel):
    """Why a request was refused."""

    detail: str


class Model(BaseModel):
    """The model that answers; its version grows by one with every change since the service was started."""

    classes: int
    method: str
    version: int


class Health(BaseModel):
    """Whether the service answers, and what with."""

    status: Literal["ok"]
    model: Model
    job: str | None = Field(description="Id of the teaching that runs.")


class ClassRow(BaseModel):
    """A class as it was taught."""

    name: str
    images: int
    learned: str = Field(description="Date, ISO 8601.")
    recall: float | None = Field(description="Percent, measured on pictures held out at its teaching; null if few.")


class Classes(BaseModel):
    """All classes, and which are close to each other."""

    classes: list[ClassRow]
    similar: list[tuple[str, str, float]] = Field(description="Closest pairs with the cosine between their means.")


class Choice(BaseModel):
    """A class and how sure the model is of it."""

    label: str
    confidence: Share


class Answer(BaseModel):
    """The prediction for one picture."""

    file: str | None
    label: str | None = Field(description="null where the confidence is below `reject_below`: none of these.")
    confidence: Share
    top: list[Choice]


class Refusal(BaseModel):
    """A picture that could not be read, and why."""

    file: str | None
    error: str


class Predictions(BaseModel):
    """One entry for each picture, in their order."""

    predictions: list[Answer | Refusal]


class Images(BaseModel):
    """Pictures as text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    images: list[Annotated[str, Field(min_length=1)]] = Field(
        min_length=1, description="Pictures in base64, or as data addresses."
    )


class Started(BaseModel):
    """A teaching that was taken on."""

    job: str
    classes: list[str]
    images: int
    refused: list[Refusal] = Field(description="Files that are left out, and why.")


class JobState(BaseModel):
    """A teaching and how far it is."""

    id: str
    status: Literal["queued", "running", "done", "failed", "cancelled"]
    progress: Share
    message: str
    started: str
    ended: str | None
    classes: list[str]


class JobList(BaseModel):
    """The last hundred teachings, the newest first."""

    jobs: list[JobState]


class Names(BaseModel):
    """Classes by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    classes: list[str] = Field(min_length=1)


class Forgotten(BaseModel):
    """Classes that are gone."""

    forgotten: list[str]


class Undone(BaseModel):
    """The model after the last teaching was undone."""

    model: Model
