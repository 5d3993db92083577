"""A plot as SVG, without a library: jobs a second, round after round."""

from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 300, 70, 40
COLORS = ("#0a7", "#c52", "#46b", "#a3a", "#777")


def svg(title: str, lines: Mapping[str, Sequence[float]]) -> str:
    """Draw one line for each name; the x axis counts from 1, the y axis begins at 0."""
    top = max(max(values) for values in lines.values()) * 1.1
    count = max(len(values) for values in lines.values())

    def x(place: float) -> float:
        return LEFT + (WIDTH - LEFT - 130) * place / max(count - 1, 1)

    def y(value: float) -> float:
        return 40 + (HEIGHT - BOTTOM - 40) * (1 - value / top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{title}</text>',
    ]
    for step in range(5):
        value = top * step / 4
        parts.append(
            f'<path d="M{LEFT} {y(value):.0f}H{WIDTH - 130}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y(value) + 4:.0f}" text-anchor="end">{value:,.0f}</text>'
        )
    for place in range(count):
        parts.append(
            f'<text x="{x(place):.0f}" y="{HEIGHT - 18}" text-anchor="middle">{place + 1}</text>'
        )
    for color, (name, values) in zip(COLORS, lines.items(), strict=False):
        points = " ".join(f"{x(i):.0f},{y(v):.0f}" for i, v in enumerate(values))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
            f'<text x="{x(len(values) - 1) + 8:.0f}" y="{y(values[-1]) + 4:.0f}" fill="{color}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
