"""A graph as a pure function of JAX arrays, without torch's memory and without an engine.

One process runs all cases, because starting a process takes longer than some of them. At the end it checks that the other parts of dynaxla
were not imported. It uses quick XLA compilation: the tests are about the function that JAX traces.
"""

from __future__ import annotations

import pytest

from support.processes.scripts import run_script
from support.timing import quick_compilation

SETUP = """if True:
    import sys, jax, numpy as np, torch
    from jax import numpy as jnp
    from torch._functorch.aot_autograd import aot_export_module
    from dynaxla.capture.decompositions import decompositions
    from dynaxla.lowering import Interpreter
    from dynaxla.lowering.function import Function

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def function_of(model, *inputs):
        # Returns: the function of parameters, buffers and inputs, and these.
        model = model.eval().requires_grad_(False)

        class Tuple(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, *inputs):
                return (self.model(*inputs),)

        module, _ = aot_export_module(Tuple(), inputs, trace_joint=False, decompositions=decompositions("cpu"))
        tensors = [*model.parameters(), *model.buffers(), *inputs]
        return Function(Interpreter(module, "cpu", kernels=False)), [jnp.asarray(t.numpy()) for t in tensors]
"""
RESNET = """
    with jax.enable_x64(True):
        from dynaxla.bench.suites import import_package
        resnet = import_package("torchvision").models.resnet
        model, x = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1]), torch.randn(2, 3, 32, 32)
        function, arrays = function_of(model, x)
        assert not function.draws_random
        expected = model(x).numpy()
        logits = jax.jit(lambda *a: function(a).outputs[0])(*arrays)
        np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)

        # Gradients of the last layer's weights, and of the image.
        weight = len(list(model.parameters())) - 2
        def loss(weights, image):
            return (function([*arrays[:weight], weights, *arrays[weight + 1 : -1], image]).outputs[0] ** 2).sum()
        mine = jax.jit(jax.grad(loss, argnums=(0, 1)))(arrays[weight], arrays[-1])
        image = x.clone().requires_grad_()
        model.fc.weight.requires_grad_()
        (model(image) ** 2).sum().backward()
        np.testing.assert_allclose(mine[0], model.fc.weight.grad.numpy(), rtol=1e-3, atol=1e-2)
        np.testing.assert_allclose(mine[1], image.grad.numpy(), rtol=1e-2, atol=1e-2 * float(image.grad.abs().max()))

        images = torch.randn(3, 2, 3, 32, 32)
        many = jax.jit(jax.vmap(lambda image: function([*arrays[:-1], image]).outputs[0]))(jnp.asarray(images.numpy()))
        with torch.no_grad():
            np.testing.assert_allclose(many, torch.stack([model(image) for image in images]).numpy(), rtol=1e-3, atol=1e-3)
"""
BERT = """
    with jax.enable_x64(True):
        from dynaxla.bench.suites import import_package
        transformers = import_package("transformers")
        config = transformers.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=100, attn_implementation="sdpa"
        )
        bert = transformers.BertModel(config)

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.bert = bert

            def forward(self, tokens):
                return self.bert(tokens, return_dict=True).last_hidden_state

        # With the padding's token, whose row of the table gets no gradient.
        model, tokens = Model(), torch.randint(1, 100, (2, 7))
        tokens[:, :2] = bert.embeddings.word_embeddings.padding_idx
        function, arrays = function_of(model, tokens)
        states = jax.jit(lambda *a: function(a).outputs[0])(*arrays)
        np.testing.assert_allclose(states, model(tokens).numpy(), rtol=1e-3, atol=1e-4)

        def loss(words):
            return (function([words, *arrays[1:]]).outputs[0] ** 3).sum()
        words = bert.embeddings.word_embeddings.weight
        assert arrays[0].shape == words.shape
        words.requires_grad_()
        (model(tokens) ** 3).sum().backward()
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(arrays[0]), words.grad.numpy(), rtol=1e-2, atol=1e-3)

        several = torch.randint(0, 100, (3, 2, 7))
        many = jax.jit(jax.vmap(lambda t: function([*arrays[:-1], t]).outputs[0]))(jnp.asarray(several.numpy()))
        with torch.no_grad():
            np.testing.assert_allclose(many, torch.stack([model(t) for t in several]).numpy(), rtol=1e-3, atol=1e-4)
"""
CHECKS = """
    from torch.fx.experimental.proxy_tensor import make_fx
    with jax.enable_x64(True):
        graph = make_fx(lambda x, i: [x[i], torch.rand_like(x)], tracing_mode="fake")(torch.ones(3), torch.tensor([0, 1]))
        function = Function(Interpreter(graph, "cpu", kernels=False))
        assert function.draws_random
        run = jax.jit(lambda x, i, key: function([x, i], key))
        x = jnp.arange(3.0, dtype=jnp.float32)
        good, bad = (run(x, jnp.asarray(index), jax.random.key(0)) for index in ([2, 0], [3, 0]))
        assert good.outputs[0].tolist() == [2, 0]
        (check,) = good.checks
        assert bool(check.condition) and check.error is IndexError
        assert not bool(bad.checks[0].condition)
        assert (good.outputs[1] == bad.outputs[1]).all()
        assert (good.outputs[1] != run(x, jnp.asarray([2, 0]), jax.random.key(1)).outputs[1]).any()
"""
PORTABLE = """
    from dynaxla.errors import UnsupportedOp
    with jax.enable_x64(True):
        graph = make_fx(lambda x: [torch.ops.aten.exp(x)], tracing_mode="fake")(torch.ones(3))
        assert Function.portable(graph)([jnp.zeros(3, jnp.float32)]).outputs[0].tolist() == [1, 1, 1]
        graph = make_fx(lambda x: [torch.ops.aten.linalg_eig(x)[0]], tracing_mode="fake")(torch.ones(3, 3))
        try:
            Function.portable(graph)
        except UnsupportedOp as error:
            assert "linalg_eig" in str(error)
        else:
            raise AssertionError("only torch's kernel can compute linalg_eig for all platforms")
"""

END = """
    loaded = [name for name in sys.modules if name.startswith(("dynaxla.buffers", "dynaxla.engine", "dynaxla.backend"))]
    assert not loaded, loaded
    print("done")
"""


@pytest.mark.thorough
def test_functions_under_jax_transforms() -> None:
    assert run_script(SETUP + RESNET + BERT + CHECKS + PORTABLE + END, XLA_FLAGS=quick_compilation.flags()) == "done\n"
