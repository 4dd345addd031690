"""NumPy is its own namespace, and a device's arithmetic imports none of the sub-packages that it has no use for."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from hushfleet import array_api


def test_numpy_is_its_own_namespace_and_pytorch_has_the_compatible_one() -> None:
    assert array_api.array_namespace(np.ones(2), np.float32(1)) is np
    assert array_api.array_namespace(torch.ones(2)).__name__ == "array_api_compat.torch"
    with pytest.raises(TypeError):
        array_api.array_namespace(np.ones(2), torch.ones(2))


def test_a_devices_arithmetic_imports_nothing_more() -> None:
    script = (
        "import sys, numpy as np\n"
        "from hushfleet.learning.optim import Adam\n"
        "from hushfleet.params import ParamLayout\n"
        "from hushfleet.privacy.clipping import clip_layers\n"
        "from hushfleet.privacy.mechanism import GaussianMechanism\n"
        "from hushfleet.privacy.noise import SecureNoise\n"
        "layout, params = ParamLayout(('a.weight',), ((4,),)), np.zeros(4, np.float32)\n"
        "Adam(0.1).step(params, np.ones(4, np.float32))\n"
        "mechanism = GaussianMechanism(1.0)\n"
        "clipped = clip_layers(params, layout, [0.1])\n"
        "mechanism.add_noise(clipped, mechanism.layer_stds([0.1]), SecureNoise(), layout=layout)\n"
        "print(sorted({'array_api_compat.numpy', 'numpy.f2py', 'numpy.testing'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
