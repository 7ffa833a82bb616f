"""What an op's CPU kernels are called with."""


def record_kernel_calls(monkeypatch, op):
    """The list that each call of the forward kernel adds its arguments to: inputs, and `keep`."""
    calls, backend = [], op.backends["cpu"]

    def forward(inputs, *keep):
        calls.append((*inputs, *keep))
        return backend.forward(inputs, *keep)

    monkeypatch.setitem(op.backends, "cpu", backend._replace(forward=forward))
    return calls
