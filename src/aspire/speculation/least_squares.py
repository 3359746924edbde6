"""Least squares of three coefficients that must not be negative, from normal equations."""

Three = tuple[float, float, float]


def non_negative(gram: list[list[float]], moment: list[float]) -> Three:
    """The solution of gram x = moment with all x >= 0 that explains most: the best of the 7 faces that is feasible."""
    best, best_gain = (0.0, 0.0, 0.0), 0.0
    for mask in range(1, 8):
        chosen = [i for i in range(3) if mask >> i & 1]
        part = _solve([[gram[i][j] for j in chosen] for i in chosen], [moment[i] for i in chosen])
        if part is None or min(part) < 0.0:
            continue
        gain = sum(value * moment[i] for value, i in zip(part, chosen, strict=True))
        if gain > best_gain * (1.0 + 1e-12):
            full = dict(zip(chosen, part, strict=True))
            best, best_gain = (full.get(0, 0.0), full.get(1, 0.0), full.get(2, 0.0)), gain
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination with pivoting; None when the system is singular."""
    n = len(right)
    rows = [[*matrix[i], right[i]] for i in range(n)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        if abs(rows[pivot][i]) < 1e-12 * max(1.0, abs(matrix[i][i])):
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, n):
            factor = rows[r][i] / rows[i][i]
            rows[r] = [a - factor * b for a, b in zip(rows[r], rows[i], strict=True)]
    result = [0.0] * n
    for i in reversed(range(n)):
        result[i] = (rows[i][n] - sum(rows[i][j] * result[j] for j in range(i + 1, n))) / rows[i][i]
    return result
