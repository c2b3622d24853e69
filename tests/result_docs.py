"""Small result documents for tests, with arithmetic that can be checked by hand. 64 x 256 head-pages."""

from coldkv import results

HOT = {"int8": 16896, "nvfp4": 9216, "bf16": 32768}
SLOT = 9232
ELEMENTS = 64 * 256
SHA = "ab" * 32


def row(layer=0, plane="k", tier="int8", codec="e2m1-g64", *, head=0, pages=10, dump="d", cold_page=SLOT, **changes):
    """One row of `pages` head-pages; keyword arguments replace columns."""
    hot, cold = HOT[tier] * pages, cold_page * pages
    nmse = 0.016 if plane == "k" else 0.0125
    base = {
        "dump": dump,
        "layer": layer,
        "plane": plane,
        "head": head,
        "tier": tier,
        "codec": codec,
        "backend": "torch",
        "pages": pages,
        "tokens": pages * 64,
        "elements": pages * ELEMENTS,
        "hot_bytes": hot,
        "cold_bytes": cold,
        "ratio": hot / cold,
        "bits_per_element": 8 * cold / (pages * ELEMENTS),
        "nmse_hot": nmse,
        "nmse_ref": nmse + 1e-4,
        "nmse_centered": nmse * 1.5,
        "snr_db": 18.0,
        "max_abs_err": 0.5,
        "cosine": 0.993,
        "invalid_pages": 0,
        "logit_rmse": 0.2 if plane == "k" else None,
        "attn_out_nmse": None,
    }
    return base | changes


def layer(index=0, plane="k", tier="int8", *, pages=10, dump="d", heads=1, partial_tokens=0):
    """The run.layers entry that goes with `row`."""
    return {
        "dump": dump,
        "layer": index,
        "tier": tier,
        "plane": plane,
        "heads": heads,
        "pages": pages,
        "tokens": pages * 64,
        "partial_tokens": partial_tokens,
        "hot_bytes": HOT[tier] * pages * heads,
    }


def run(layers, *, name="int8", mode="uniform", tier_layers=None, sha256=None):
    """A run header over `layers`."""
    return results.run_header(
        backend="torch",
        device="cpu",
        torch_version="2.0",
        argv=["coldkv", "measure"],
        dump_sha256=sha256 or {entry["dump"]: SHA for entry in layers},
        table={"name": name, "mode": mode, "tier_layers": tier_layers or {}},
        layers=layers,
    )


def uniform_doc(**changes):
    """Two int8 layers, K and V, one codec; `changes` apply to every row."""
    places = [(index, plane) for index in (0, 1) for plane in ("k", "v")]
    rows = [row(index, plane, **changes) for index, plane in places]
    return results.document(run([layer(index, plane) for index, plane in places], tier_layers={"int8": 2}), rows)


def seed_doc(codecs=("e2m1-g64",), tiers=("int8",)):
    """The preset seed-10-6 applied by tier to a dump of three layers; the codecs pack only `tiers`."""
    layers = [layer(i, p, t, partial_tokens=7) for t in ("int8", "nvfp4") for i in range(3) for p in "kv"]
    rows = [row(i, p, t, codec) for codec in codecs for t in tiers for i in range(3) for p in "kv"]
    table = {"name": "seed-10-6", "mode": "tiers", "tier_layers": {"nvfp4": 10, "int8": 6}}
    return results.document(run(layers, **table), rows)
