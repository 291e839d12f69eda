# SPDX-License-Identifier: Apache-2.0
"""A program: compiles the kernels of a generated wrapper in a service's workers, runs them on a GPU
that is not there, prints what happened.

python generated_service.py WRAPPER
"""

import json
import sys

from bundler.compile.service import CompileService
from bundler.integrations.inductor import compile_generated
from bundler.runtime import DryDriver
from bundler.runtime.tuning.benchmark import GivenClock
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.toolchain import tuner_toolchain


class Tensor:
    """What a tensor is to a launch."""

    def __init__(self, dtype):
        self.dtype = dtype

    def data_ptr(self):
        return 0x7F00_0000_0000

    def get_device(self):
        return 0


def main():
    hits, real = [], tuner_toolchain.compile_call

    def compile_call(*args, **more):
        event = real(*args, **more)
        hits.append(event.cache_hit)
        return event

    tuner_toolchain.compile_call = compile_call
    options = TunerOptions(driver=DryDriver("cuda"), workers=1, record=False)
    with CompileService(
        2, preload="bundler.integrations.inductor_generated:import_helpers"
    ) as service:
        clock = lambda: GivenClock(lambda fn, quantiles: [1.0] * 3)  # noqa: E731
        scope = dict(compile_generated(sys.argv[1], service, options=options, clock=clock))
        broken = scope.pop("triton_poi_broken").exception()
        service.wait(scope)
        counters = service.counters
    import torch  # after the service, to see that importing the helpers was enough for it

    fp32 = Tensor(torch.float32)
    scope["triton_poi_double"].run(fp32, fp32, 4096, stream=0)
    scope["triton_poi_first"].run(fp32, 1, stream=0)
    print(
        json.dumps(
            {
                "kernels": sorted(scope),
                "compiled": counters.compiled,
                "failed": counters.failed,
                "hits": hits,
                "grids": [launch.grid for launch in options.driver.launches],
                "broken": str(broken),
            }
        )
    )


if __name__ == "__main__":
    main()
