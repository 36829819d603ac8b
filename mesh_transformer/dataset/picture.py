"""The picture of the lengths of the documents."""

import io

from mesh_transformer.dataset.counts import BINS, PER_OCTAVE, DocumentCounts

_DPI = 120


def length_picture(name: str, counts: DocumentCounts, seq: int, packing: str = "") -> bytes:
    """A PNG: how many documents have how many tokens, and where the tokens are.

    Args:
        name: of the data set, for the title.
        counts: of the documents, at least one.
        seq: tokens of a sequence, marked in the picture.
        packing: the end of the title, about the packing.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    used = [i for i, count in enumerate(counts.lengths) if count]
    bins = range(used[0], used[-1] + 1)
    edges = [2 ** (i / PER_OCTAVE) for i in range(BINS + 1)]
    documents = [100 * counts.lengths[i] / counts.documents for i in bins]
    middle = [counts.lengths[i] * (edges[i] * edges[i + 1]) ** 0.5 for i in bins]
    tokens = [100 * weight / sum(middle) for weight in middle]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    shown = edges[bins[0] : bins[-1] + 2]
    axes.stairs(documents, shown, fill=True, alpha=0.4, label="documents")
    axes.stairs(tokens, shown, linewidth=1.5, label="tokens in these documents")
    axes.axvline(seq, color="gray", linewidth=1, linestyle="--", label=f"a sequence: {seq:,} tokens")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    mean = counts.tokens / counts.documents
    axes.set(
        xlabel="tokens in a document",
        ylabel="share (%)",
        title=f"{counts.documents:,} documents of {name}, {mean:,.0f} tokens each on average{packing}",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    png = io.BytesIO()
    figure.savefig(png, dpi=_DPI, format="png")
    return png.getvalue()
