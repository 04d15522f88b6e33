# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Teach a model new classes from image folders
#
# A model learns classes in May, further classes in June, without May's pictures, and forgets one again. The pictures
# are drawn by a few lines below, so nothing is downloaded. It takes about a minute on a CPU.

# %%
# In Colab the pinned versions are installed; elsewhere what is installed is used.
import sys

if "google.colab" in sys.modules:
    get_ipython().run_line_magic("pip", "install --quiet efcil==0.2.0")

# %%
import efcil

if efcil.__version__ != "0.2.0":
    raise SystemExit(
        f"this notebook is for efcil 0.2.0, and {efcil.__version__} is installed: pip install efcil==0.2.0"
    )

# %% [markdown]
# ## Pictures: one folder per class

# %%
import random
from pathlib import Path

from PIL import Image, ImageDraw

random.seed(0)


def draw(path, shape, color, count=20):
    """Draw pictures of a shape, at random places on a noisy ground."""
    path.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image = Image.effect_noise((96, 96), 40).convert("RGB")
        x, y, size = random.randint(5, 35), random.randint(5, 35), random.randint(30, 55)
        pen = ImageDraw.Draw(image)
        if shape == "triangle":
            pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill=color)
        else:
            getattr(pen, shape)((x, y, x + size, y + size), fill=color)
        image.save(path / f"{number}.jpg")


draw(Path("pictures/may/red disk"), "ellipse", "crimson")
draw(Path("pictures/may/blue square"), "rectangle", "royalblue")
draw(Path("pictures/june/green triangle"), "triangle", "seagreen")
draw(Path("pictures/june/yellow square"), "rectangle", "gold")
for name, shape, color in (("red disk", "ellipse", "crimson"), ("green triangle", "triangle", "seagreen")):
    draw(Path("pictures/test") / name, shape, color, count=5)

# %% [markdown]
# ## Learn in May, learn in June

# %%
model = efcil.IncrementalClassifier(progress=False).learn("pictures/may")
print(model, list(model.classes_))

# %%
import shutil

shutil.rmtree("pictures/may")  # not needed any more: the model keeps statistics of its classes, no pictures
model.learn("pictures/june")
print(model, list(model.classes_))

# %% [markdown]
# ## Classify pictures it has not seen

# %%
test = sorted(Path("pictures/test").rglob("*.jpg"))
for path, label in zip(test, model.predict(test), strict=True):
    print(f"{path.parent.name:15} is called {label}")
accuracy = model.score("pictures/test")
print(f"accuracy {100 * accuracy:.0f} %")

# %% [markdown]
# ## Forget a class, save the model

# %%
model.forget("yellow square")
model.save("shapes")
again = efcil.IncrementalClassifier.load("shapes", progress=False)
print(again, sorted(path.name for path in Path("shapes").iterdir()))

# %% [markdown]
# `efcil serve shapes` offers this model to a browser, and `efcil export shapes --onnx shapes.onnx` to other programs.
