"""Plots as SVG, without a library: lines over rounds, and bars."""

import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 70, 130, 40, 40
COLORS = ("#0a7", "#c52", "#46b", "#a3a", "#990", "#088", "#777")


def lines(title: str, values: Mapping[str, Sequence[float]]) -> str:
    """One line for each name; the x axis counts from 1, the y axis begins at 0."""
    top = max(max(each) for each in values.values()) * 1.1
    count = max(len(each) for each in values.values())

    def x(place: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * place / max(count - 1, 1)

    def y(value: float) -> float:
        return TOP + (HEIGHT - BOTTOM - TOP) * (1 - value / top)

    parts = []
    for value in ticks(top):
        parts.append(
            f'<path d="M{LEFT} {y(value):.0f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
        )
        parts.append(text(LEFT - 8, y(value) + 4, f"{value:,.0f}", "end"))
    for place in range(count):
        parts.append(text(x(place), HEIGHT - 18, str(place + 1), "middle"))
    lowest = HEIGHT - BOTTOM + 16.0
    by_last = sorted(values.items(), key=lambda item: item[1][-1])
    for name, each in by_last:
        color = COLORS[list(values).index(name) % len(COLORS)]
        points = " ".join(f"{x(i):.0f},{y(v):.0f}" for i, v in enumerate(each))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
        )
        lowest = min(y(each[-1]) + 4, lowest - 13)  # names must not overlap
        parts.append(text(x(len(each) - 1) + 8, lowest, name, fill=color))
    return framed(title, parts)


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to the top, at most six."""
    unit = 10 ** math.floor(math.log10(top))
    step = next(unit * part for part in (0.2, 0.5, 1, 2) if top / (unit * part) < 6)
    return [step * count for count in range(int(top / step) + 1)]


def bars(title: str, values: Mapping[str, float]) -> str:
    """One bar for each name, from 0."""
    top = max(max(values.values()), 100.0)
    height = (HEIGHT - TOP - BOTTOM) / len(values)
    parts = []
    for place, (name, value) in enumerate(values.items()):
        y = TOP + 10 + place * height
        width = (WIDTH - LEFT - RIGHT - 60) * value / top
        color = COLORS[place % len(COLORS)]
        parts.append(
            f'<rect x="{LEFT + 40}" y="{y:.0f}" width="{width:.0f}" '
            f'height="{height * 0.6:.0f}" fill="{color}"/>'
        )
        parts.append(text(LEFT + 32, y + height * 0.4, name, "end"))
        parts.append(text(LEFT + 48 + width, y + height * 0.4, f"{value:.0f} %"))
    return framed(title, parts)


def text(
    x: float, y: float, words: str, anchor: str = "start", fill: str = "black"
) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{fill}">'
        f"{words}</text>"
    )


def framed(title: str, parts: list[str]) -> str:
    frame = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<text x="{LEFT}" y="22" font-size="14">{title}</text>',
            *parts,
            "</svg>",
            "",
        ]
    )
