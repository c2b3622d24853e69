"""Chooses one point on every rate-distortion curve so that the total distortion under a byte budget is smallest."""

from dataclasses import dataclass

from coldkv.errors import InputError


@dataclass(frozen=True)
class Point:
    """One setting of one plane: `cost` bytes, `error` as a sum of squares that adds up over planes, its `step`."""

    cost: float
    error: float
    step: int


def lower_hull(points: list[Point]) -> list[Point]:
    """The points on the lower convex hull of error over cost, cheapest first; only these can be optimal."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.cost, p.error)):
        if best and point.error >= best[-1].error:
            continue
        while len(best) >= 2 and _slope(best[-2], best[-1]) >= _slope(best[-1], point):
            best.pop()
        best.append(point)
    return best


def _slope(a: Point, b: Point) -> float:
    return (b.error - a.error) / (b.cost - a.cost)


def allocate(curves: dict, budget: float) -> dict:
    """Key -> Point for every curve (key -> points): the least total error whose total cost is within `budget`.

    Lagrangian: every plane spends where a byte buys the most. What is left below one more step of the hull stays
    unspent. InputError where even the cheapest points cost more than the budget.
    """
    hulls = {key: lower_hull(points) for key, points in curves.items()}
    chosen = {key: 0 for key in hulls}
    spent = sum(hull[0].cost for hull in hulls.values())
    if spent > budget:
        raise InputError(
            f"budget: expected at least {spent:.0f} bytes for the coarsest steps tried, found {budget:.0f}"
        )
    moves = sorted(
        (_slope(a, b), key, i + 1) for key, hull in hulls.items() for i, (a, b) in enumerate(zip(hull, hull[1:], strict=False))
    )
    # on a convex hull slopes rise towards 0, so a plane's moves come in order
    closed = set()
    for _, key, i in moves:
        extra = hulls[key][i].cost - hulls[key][i - 1].cost
        if key in closed or spent + extra > budget:
            closed.add(key)
            continue
        chosen[key], spent = i, spent + extra
    return {key: hulls[key][i] for key, i in chosen.items()}
