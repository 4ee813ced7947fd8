"""Normal distributions of logarithms of constants: their matrices, draws, and what a measurement adds."""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from realhf.base.errors import UserError
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.uncertainty import Uncertainty

_NUGGET = 1e-12  # a variance, for constants that are sure
_LEAST_NOISE = 1e-6  # a standard deviation, of readings that were all the same


def covariance_of(stated: Uncertainty) -> np.ndarray:
    """Of the logarithms, in the order of `spread`, [constants, constants]. Raises UserError if the correlation is that
    of no distribution."""
    matrix = np.eye(len(stated.spread))
    for row, numbers in enumerate(stated.correlation, start=1):
        matrix[row, :row] = matrix[:row, row] = numbers
    if stated.correlation and np.linalg.eigvalsh(matrix).min() <= 0:
        raise UserError(
            "uncertainty: correlation is that of no distribution (an eigenvalue that is not positive); fit it again"
        )
    spread = np.array(list(stated.spread.values()))
    return matrix * np.outer(spread, spread)


def of_covariance(names: Sequence[str], covariance: np.ndarray, **errors: float) -> Uncertainty:
    """The spreads and correlations of a covariance [constants, constants]."""
    spread = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    scale = np.where(spread > 0, spread, np.inf)
    matrix = covariance / np.outer(scale, scale)
    rows = tuple(tuple(map(float, matrix[row, :row])) for row in range(1, len(names)))
    return Uncertainty(spread=dict(zip(names, map(float, spread), strict=True)), correlation=rows, **errors)


def observed(
    mean: np.ndarray, covariance: np.ndarray, weights: np.ndarray, values: np.ndarray, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(mean, covariance) of a normal distribution [n] of which `weights` [observations, n] x it was seen to be `values`
    [observations], each with the standard deviation `noise` (Rasmussen and Williams, 2006, equation 2.19)."""
    gain = covariance @ weights.T @ np.linalg.inv(weights @ covariance @ weights.T + np.diag(noise**2))
    return mean + gain @ (values - weights @ mean), covariance - gain @ weights @ covariance


def standard_draws(dimensions: int, count: int, seed: int) -> np.ndarray:
    """Standard normal numbers [count, dimensions], in pairs of opposite sign: their mean is exactly 0. The same for the
    same arguments, and each column for the same number of it."""
    columns = [np.random.default_rng([seed, column]).standard_normal(count // 2) for column in range(dimensions)]
    half = np.stack(columns, axis=1) if columns else np.empty((count // 2, 0))
    return np.concatenate([half, -half])


def square_root(covariance: np.ndarray) -> np.ndarray:
    """The lower triangular matrix whose product with its transpose is `covariance` (Cholesky: unlike eigenvectors, it
    is the same on every machine)."""
    root: np.ndarray = np.linalg.cholesky(covariance + _NUGGET * np.eye(len(covariance)))
    return root


def narrowed(hardware: Hardware, measured: Mapping[str, tuple[float, float]]) -> Hardware:
    """The description after constants were measured: by name (value, standard deviation of its logarithm). What is
    correlated with them moves along. A constant of which nobody says how sure it is takes the measured value."""
    stated = hardware.sureness
    names = list(stated.spread)
    known = [name for name in measured if name in stated.spread]
    values_by_name = {name: value for name, (value, _) in measured.items()}
    if not known:
        return hardware.with_constants(values_by_name)
    mean = np.log([hardware.constant(name) for name in names])
    weights = np.array([[float(name == other) for other in names] for name in known])
    values = np.array([math.log(measured[name][0]) for name in known])
    noise = np.array([max(measured[name][1], _LEAST_NOISE) for name in known])
    mean, covariance = observed(mean, covariance_of(stated), weights, values, noise)
    narrower = of_covariance(names, covariance, call_error=stated.call_error, profiled_error=stated.profiled_error)
    values_by_name |= dict(zip(names, map(float, np.exp(mean)), strict=True))
    return msgspec.structs.replace(hardware.with_constants(values_by_name), uncertainty=narrower)
