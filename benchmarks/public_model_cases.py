"""Six models from PyPI as their users have them, and the lines that stack their layers and tile their loss.

Each class has `make`, `data`, `loss` as the model's own pages write it, `stack` and `small_loss` with `llamem`, and a
natural wrong way to use it. `benchmarks/public_models.py` compiles, compares and proves them.
"""

import dataclasses
import inspect
import sys
from typing import Any

import equinox as eqx
import flax.nnx.module
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import llamem

PACKAGES = ("mamba2-jax", "gemma", "eqx-zoo", "equimo", "jimmy-vision", "canvit-nnx")
# Python 3.11 will do with `load_safetensors[T]` of eqx-zoo written without its type parameter, and with a mock in place
# of `dialog`, which gemma needs for chats.

# jimmy-vision 0.0.7 asks for a module of flax 0.8 that has moved.
sys.modules.setdefault("flax.nnx.nnx", nnx)
sys.modules.setdefault("flax.nnx.nnx.module", flax.nnx.module)
try:
    import canvit_core.config as canvit_config  # pyrefly: ignore[missing-import]
    import canvit_nnx  # pyrefly: ignore[missing-import]
    import equimo.models  # pyrefly: ignore[missing-import]
    import eqx_zoo  # pyrefly: ignore[missing-import]
    import eqx_zoo.layers  # pyrefly: ignore[missing-import]
    import jimmy.models.configs  # pyrefly: ignore[missing-import]
    import jimmy.models.vit  # pyrefly: ignore[missing-import]
    import mamba2_jax  # pyrefly: ignore[missing-import]
    from gemma import gm  # pyrefly: ignore[missing-import]
except ImportError as error:
    raise SystemExit(f"{error}: pip install {' '.join(PACKAGES)}, in an environment of Python 3.12.") from None

KEY = jax.random.key(0)


def softmax_loss(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), labels).mean()


class Case:
    """One model; `also` is what a user writes beside `stack` and `small_loss`."""

    also: Any = None

    def make(self, tiny: bool, /) -> Any:
        raise NotImplementedError

    def stack(self, model: Any, /) -> Any:
        raise NotImplementedError

    def small_loss(self, model: Any, batch: Any, /, remat: str | None = "nothing") -> Any:
        raise NotImplementedError

    def build(self, stacked: bool) -> Any:
        return self.stack(self.make(False)) if stacked else self.make(False)

    def lines_written(self) -> int:
        """Return how many lines stack the layers and tile the loss, without docstrings and blank lines."""
        sources = [self.stack, self.small_loss, *([self.also] if self.also else [])]
        lines = [line.strip() for source in sources for line in inspect.getsource(source).splitlines()]
        return sum(bool(line) and not line.startswith('"""') for line in lines)


class Mamba2(Case):
    """Flax nnx, a list of blocks of which each has its number."""

    title, package, library, batch = "Mamba2-130m, 4 x 1,024 tokens", "mamba2-jax", "nnx", 4

    def make(self, tiny: bool) -> Any:
        config = mamba2_jax.Mamba2Config
        return mamba2_jax.Mamba2ForCausalLM(config.tiny() if tiny else config(), rngs=nnx.Rngs(0))

    def data(self, batch: int, tiny: bool) -> Any:
        return jax.random.randint(KEY, (batch, 64 if tiny else 1024), 0, 1000)

    def loss(self, model: Any, tokens_BT: Any) -> Any:
        return model(tokens_BT, labels=tokens_BT)["loss"]

    def stack(self, model: Any) -> Any:
        for block in model.backbone.layers:
            block.mixer.layer_idx = 0  # for caches alone
        model.backbone.layers = llamem.stack_layers(model.backbone.layers)
        return model

    def small_loss(self, model: Any, tokens_BT: Any, remat: str | None = "nothing") -> Any:
        backbone = model.backbone
        x_BTD = backbone.embedder(tokens_BT)
        x_BTD = llamem.apply_stack(lambda block, x: block(x)[0], backbone.layers, x_BTD, remat=remat)
        head_VD = backbone.embedder.embedding[...]
        return llamem.tiled_cross_entropy(backbone.final_norm(x_BTD)[:, :-1], head_VD, tokens_BT[:, 1:])

    def wrong(self) -> None:
        """Stack the blocks with their numbers."""
        llamem.stack_layers(self.make(tiny=True).backbone.layers)


class StackedGemma(gm.nn.Gemma3_270M):
    """Five layers with a window, one without, and so on: one stack, in which each layer says which it is."""

    remat: str | None = "nothing"

    def _apply_attention(self, inputs: Any, cache: Any) -> Any:
        def run(block: Any) -> Any:
            block = block.clone(parent=None)
            return lambda p, x: block.apply({"params": p}, x, inputs.positions, None, inputs.attention_mask)[1]

        kinds = [run(self.blocks[0]), run(self.blocks[5])]
        is_global_L = jnp.array([kind == self.blocks[5].attn_type for kind in self.config.attention_types], int)
        stacked = self.variables["params"]["layers"]
        x = llamem.apply_stack(
            lambda p, x, kind: jax.lax.switch(kind, kinds, p, x),
            stacked,
            inputs.embeddings,
            is_global_L,
            remat=self.remat,
        )
        return self.final_norm(x), {}


class Gemma3(Case):
    """Flax linen, bf16, layers of two kinds."""

    title, package, library, batch = "Gemma3-270m, bf16, 4 x 1,024 tokens", "gemma", "linen", 4
    also = StackedGemma

    def model(self, tiny: bool, kind: Any = gm.nn.Gemma3_270M, **how: Any) -> Any:
        sizes = {"num_embed": 1000, "embed_dim": 64, "hidden_dim": 96, "head_dim": 16, "sliding_window_size": 5}
        config = dataclasses.replace(kind.config, **sizes if tiny else {})
        return kind(tokens="tokens", config=config, dtype=jnp.float32 if tiny else jnp.bfloat16, **how)

    def make(self, tiny: bool) -> Any:
        self.tiny = tiny
        return self.model(tiny).init(KEY, jnp.zeros((1, 8), int))["params"]

    def data(self, batch: int, tiny: bool) -> Any:
        return jax.random.randint(KEY, (batch, 33 if tiny else 1025), 1, 1000)

    def loss(self, params: Any, tokens_BT: Any) -> Any:
        logits_BTV = self.model(self.tiny).apply({"params": params}, tokens_BT[:, :-1]).logits
        return softmax_loss(logits_BTV, tokens_BT[:, 1:])

    def stack(self, params: Any) -> Any:
        layers = [params.pop(f"layer_{i}") for i in range(18)]
        return {**params, "layers": llamem.stack_layers(layers)}

    def small_loss(self, params: Any, tokens_BT: Any, remat: str | None = "nothing") -> Any:
        model = self.model(self.tiny, StackedGemma, remat=remat)
        hidden_BTD = model.apply({"params": params}, tokens_BT[:, :-1], return_hidden_states=True).hidden_states
        head_VD = params["embedder"]["input_embedding"]
        return llamem.tiled_cross_entropy(hidden_BTD, head_VD, tokens_BT[:, 1:])

    def wrong(self) -> None:
        """Return what a block returns, its cache and x."""
        layers = self.stack(self.make(tiny=True))["layers"]
        positions, sees = jnp.arange(8)[None], jnp.ones((1, 8, 8), bool)
        block = self.model(tiny=True).bind({}).blocks[0].clone(parent=None)
        llamem.apply_stack(
            lambda p, x: block.apply({"params": p}, x, positions, None, sees), layers, jnp.ones((1, 8, 64))
        )


class Qwen3(Case):
    """Equinox, bf16, a list of layers that see one sequence."""

    title, package, library, batch = "Qwen3-0.6b, bf16, 4 x 1,024 tokens", "eqx-zoo", "equinox", 4

    def make(self, tiny: bool) -> Any:
        config = {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 128}
        config |= {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}
        config |= {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
        if tiny:
            config |= {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
        dtype = jnp.float32 if tiny else jnp.bfloat16
        return eqx_zoo.CausalLM(eqx_zoo.models.causal_lm.Config.from_hf(config), key=KEY, dtype=dtype)

    def data(self, batch: int, tiny: bool) -> Any:
        return jax.random.randint(KEY, (batch, 33 if tiny else 1025), 0, 1000)

    def loss(self, model: Any, tokens_BT: Any) -> Any:
        logits_BTV, _ = jax.vmap(model)(tokens_BT[:, :-1])
        return softmax_loss(logits_BTV, tokens_BT[:, 1:])

    def stack(self, model: Any) -> Any:
        return eqx.tree_at(lambda m: m.model.layers, model, llamem.stack_layers(model.model.layers))

    def small_loss(self, model: Any, tokens_BT: Any, remat: str | None = "nothing") -> Any:
        inner, places_T = model.model, jnp.arange(tokens_BT.shape[1] - 1)
        sees_TT = eqx_zoo.layers.causal_mask(places_T, places_T)

        def hidden(tokens_T: Any) -> Any:
            x_TD = inner.embed_tokens.weight[tokens_T]
            x_TD = llamem.apply_stack(lambda p, x: p(x, places_T, sees_TT)[0], inner.layers, x_TD, remat=remat)
            return inner.norm(x_TD)

        hidden_BTD = jax.vmap(hidden)(tokens_BT[:, :-1])
        return llamem.tiled_cross_entropy(hidden_BTD, inner.embed_tokens.weight, tokens_BT[:, 1:])

    def wrong(self) -> None:
        """Forget `stack_layers`."""
        self.small_loss(self.make(tiny=True), self.data(2, tiny=True))


class StackedChunk(eqx.Module):
    """What equimo's BlockChunk does, over a stack; the rest of the model stays as it is."""

    blocks: Any
    remat: str | None = eqx.field(static=True, default="nothing")

    def __call__(self, x: Any, *, key: Any, rope_sincos: Any = None, inference: bool | None = None) -> Any:
        keys_L = jax.random.split(key, len(jax.tree.leaves(self.blocks)[0]) + 2)[1:-1]
        return llamem.apply_stack(
            lambda block, x, key: block(x, inference=inference, key=key), self.blocks, x, keys_L, remat=self.remat
        )


class ViT(Case):
    """Equinox, one image at a time, flags and rates among the leaves; a thousand classes leave no loss to tile."""

    title, package, library, batch = "ViT-B/16, 64 images", "equimo", "equinox", 64
    also = StackedChunk

    def make(self, tiny: bool, **how: Any) -> Any:
        how |= {"dim": 48, "num_heads": [3], "depths": [4], "img_size": 32} if tiny else {}
        return equimo.models.vit_base_patch16_224(key=KEY, **how)

    def data(self, batch: int, tiny: bool) -> Any:
        pixels = 32 if tiny else 224
        images = jax.random.normal(KEY, (batch, 3, pixels, pixels))
        return images, jax.random.randint(KEY, (batch,), 0, 1000)

    def loss(self, model: Any, batch: Any) -> Any:
        return softmax_loss(jax.vmap(lambda image: model(image, key=KEY))(batch[0]), batch[1])

    def stack(self, model: Any) -> Any:
        return eqx.tree_at(lambda m: m.blocks, model, (StackedChunk(llamem.stack_layers(model.blocks[0].blocks)),))

    def small_loss(self, model: Any, batch: Any, remat: str | None = "nothing") -> Any:
        chunk = dataclasses.replace(model.blocks[0], remat=remat)
        return self.loss(eqx.tree_at(lambda m: m.blocks[0], model, chunk), batch)

    def wrong(self) -> None:
        """A drop path that grows with depth, as ViTs are trained."""
        llamem.stack_layers(self.make(tiny=True, drop_path_rate=0.1).blocks[0].blocks)


class StackedDino(jimmy.models.vit.DinoV2):
    def stack(self) -> None:
        self.blocks, self.remat = (
            llamem.stack_layers([getattr(self, f"blocks.{i}") for i in range(self.depth)]),
            "nothing",
        )
        for i in range(self.depth):
            delattr(self, f"blocks.{i}")

    def features(self, x: Any) -> Any:
        x = self._pos_embed(self.patch_embed(x), h=x.shape[1], w=x.shape[2])
        return llamem.apply_stack(lambda block, x: block(x), self.blocks, x, remat=self.remat)


class Dino(Case):
    """Flax nnx, blocks that are attributes; a linear head of a thousand classes."""

    title, package, library, batch = "DINOv2-B/14, 518 pixels, 4 images", "jimmy-vision", "nnx", 4
    also = StackedDino

    def make(self, tiny: bool, kind: Any = jimmy.models.vit.DinoV2, **how: Any) -> Any:
        how |= {"embed_dim": 48, "num_heads": 3, "depth": 4, "img_size": 42} if tiny else {}
        model = kind(**jimmy.models.configs.DINOV2_VITB14_REG["config"] | how, rngs=nnx.Rngs(0))
        model.head = nnx.Linear(model.embed_dim, 1000, rngs=nnx.Rngs(1))
        return model

    def data(self, batch: int, tiny: bool) -> Any:
        pixels = 42 if tiny else 518
        images = jax.random.normal(KEY, (batch, pixels, pixels, 3))
        return images, jax.random.randint(KEY, (batch,), 0, 1000)

    def loss(self, model: Any, batch: Any) -> Any:
        return softmax_loss(model(batch[0])[:, 0], batch[1])

    def stack(self, model: Any) -> Any:
        model.__class__ = StackedDino
        model.stack()
        return model

    def small_loss(self, model: Any, batch: Any, remat: str | None = "nothing") -> Any:
        model.remat = remat
        return self.loss(model, batch)

    def wrong(self) -> None:
        """Drop path, whose blocks all draw from one stream."""
        model = self.make(tiny=True, drop_path_rate=0.1)
        llamem.stack_layers([getattr(model, f"blocks.{i}") for i in range(4)])


class CanViT(Case):
    """Flax nnx, one model over four glimpses of an image: a stack over time, in layers without weights."""

    title, package, library, batch = "CanViT-B/16, 4 glimpses, 16 images", "canvit-nnx", "nnx", 16

    def make(self, tiny: bool) -> Any:
        small = {"backbone_name": "vits16", "canvas_num_heads": 2, "canvas_head_dim": 16} if tiny else {}
        config, self.tiny = canvit_config.CanViTConfig(**small), tiny
        return canvit_nnx.CanViTForImageClassification(canvit_config=config, n_classes=1000, rngs=nnx.Rngs(0))

    def data(self, batch: int, tiny: bool) -> Any:
        pixels = 64 if tiny else 512
        scene = jax.random.normal(KEY, (batch, pixels, pixels, 3))
        centers = jax.random.uniform(KEY, (4, batch, 2), minval=-0.5, maxval=0.5)
        return (
            scene,
            canvit_nnx.Viewpoint(centers, jnp.full((4, batch), 0.5)),
            jax.random.randint(KEY, (batch,), 0, 1000),
        )

    def look(self, model: Any, state: Any, scene: Any, view: Any) -> Any:
        glimpse = canvit_nnx.sample_at_viewpoint(
            spatial=scene, viewpoint=view, glimpse_size_px=32 if self.tiny else 128
        )
        return model(glimpse=glimpse, state=state, viewpoint=view)

    def loss(self, model: Any, batch: Any) -> Any:
        scene, views, labels = batch
        state, logits = model.init_state(batch_size=len(scene), canvas_grid_size=4 if self.tiny else 32), []
        for center, scale in zip(*views, strict=True):
            logit, state = self.look(model, state, scene, canvit_nnx.Viewpoint(center, scale))
            logits.append(logit)
        return softmax_loss(jnp.stack(logits), jnp.broadcast_to(labels, (len(logits), *labels.shape)))

    def stack(self, model: Any) -> Any:
        return model

    def small_loss(self, model: Any, batch: Any, remat: str | None = "nothing") -> Any:
        scene, views, labels = batch
        state = model.init_state(batch_size=len(scene), canvas_grid_size=4 if self.tiny else 32)
        _, logits = llamem.apply_stack(
            lambda _, state, view: self.look(model, state, scene, view)[::-1],
            {},
            state,
            views,
            has_aux=True,
            remat=remat,
        )
        return softmax_loss(logits, jnp.broadcast_to(labels, logits.shape[:2]))

    def wrong(self) -> None:
        """Return what the model returns, logits before the state."""
        model, (scene, views, _) = self.make(tiny=True), self.data(2, tiny=True)
        state = model.init_state(batch_size=2, canvas_grid_size=4)
        llamem.apply_stack(lambda _, s, view: self.look(model, s, scene, view), {}, state, views, has_aux=True)


CASES = {"mamba2": Mamba2(), "gemma3": Gemma3(), "qwen3": Qwen3(), "vit": ViT(), "dinov2": Dino(), "canvit": CanViT()}
