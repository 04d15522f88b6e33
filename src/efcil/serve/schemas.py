"""Request and response schemas of the OpenAPI description."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from efcil.product.names import MAX_LENGTH

Share = Annotated[float, Field(ge=0, le=1)]


class Error(BaseModel):
    """Reason of a refused request."""

    detail: str


class Model(BaseModel):
    """The served model; its version is incremented by every change since the service was started."""

    name: str = Field(description="Name of its directory.")
    classes: int
    method: str
    backbone: str
    size: int = Field(description="Pixels of a side of the images that it sees.")
    version: int


class Health(BaseModel):
    """Status of the service and its model."""

    status: Literal["ok"]
    started: str = Field(description="When the service was started, ISO 8601.")
    model: Model
    job: str | None = Field(description="Id of the running update job.")


class ClassRow(BaseModel):
    """A class of the model."""

    name: str
    images: int
    learned: str = Field(description="Date, ISO 8601.")
    recall: float | None = Field(description="Percent, on images held out when learned; null if too few.")
    checked: int | None = Field(default=None, description="Number of these images, where it is known.")


class Confusions(BaseModel):
    """Estimated confusions of the present model, without those of classes with few images."""

    classes: list[str] = Field(description="The classes that are confused most, at most 20, the most confused first.")
    percent: list[list[float]] = Field(description="Percent of a class's images (row) by predicted class (column).")
    estimated: int = Field(description="Number of classes with an estimate.")
    unknown: Literal["few classes", "few images", "not estimated"] | None = Field(
        description="Reason if there is no estimate."
    )


class Classes(BaseModel):
    """All classes, the most similar pairs and estimated confusions."""

    classes: list[ClassRow]
    similar: list[tuple[str, str, float]] = Field(description="Most similar pairs with the cosine of their means.")
    confusions: Confusions


class Choice(BaseModel):
    """A class with its confidence."""

    label: str
    confidence: Share


class Answer(BaseModel):
    """Prediction for one image."""

    file: str | None
    label: str | None = Field(description="null if the image is rejected by `reject_below` or `reject_strange`.")
    confidence: Share
    typicality: Share | None = Field(
        default=None, description="Share of known-class images that fit their class no better; null if not measured."
    )
    top: list[Choice]


class Refusal(BaseModel):
    """An unreadable image with the reason."""

    file: str | None
    error: str


class Predictions(BaseModel):
    """One entry per image, in order."""

    predictions: list[Answer | Refusal]


class Images(BaseModel):
    """Images as text."""

    model_config = ConfigDict(extra="forbid", strict=True)

    images: Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)] = Field(
        min_length=1, description="Images in base64 or as data URLs."
    )


class Started(BaseModel):
    """A started update job."""

    job: str
    classes: list[str]
    images: int
    refused: list[Refusal] = Field(description="Skipped files with reasons.")


class JobState(BaseModel):
    """Update job with its progress."""

    id: str
    status: Literal["queued", "running", "done", "failed", "cancelled"]
    progress: Share
    message: str
    started: str
    ended: str | None
    classes: list[str]


class JobList(BaseModel):
    """The last hundred update jobs, newest first."""

    jobs: list[JobState]


class Names(BaseModel):
    """Class names."""

    model_config = ConfigDict(extra="forbid", strict=True)

    classes: Annotated[list[Annotated[str, Field(max_length=MAX_LENGTH)]], Field(fail_fast=True)] = Field(min_length=1)


class Forgotten(BaseModel):
    """Removed classes."""

    forgotten: list[str]


class Undone(BaseModel):
    """The model after undoing the last update."""

    model: Model
