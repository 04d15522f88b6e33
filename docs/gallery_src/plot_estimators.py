"""
New classes for precomputed features
====================================

`RidgeReconstructionClassifier` has scikit-learn's interface and learns classes one after the other, without the rows of
earlier ones. The result equals a single fit on all rows.
"""

import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from efcil import NearestMeanClassifier, RidgeReconstructionClassifier

X, y = load_digits(return_X_y=True)
X, X_test, y, y_test = train_test_split(X / 16, y, test_size=0.5, random_state=0, stratify=y)

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for model in (RidgeReconstructionClassifier(), NearestMeanClassifier()):
    accuracies = []
    for digit in range(10):
        model.partial_fit(X[y == digit], y[y == digit])
        seen = y_test <= digit
        accuracies.append(100 * np.mean(model.predict(X_test[seen]) == y_test[seen]))
    axes.plot(range(1, 11), accuracies, marker="o", label=type(model).__name__)
axes.set(xlabel="classes learned", ylabel="accuracy on all classes so far (%)")
axes.legend()
