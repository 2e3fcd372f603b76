"""Functions, and compositions of torch's function transforms of them."""

import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

FUNCTIONS = {
    "elementwise": lambda m, x: m.sin(x) * x * x,
    "mixing": lambda m, x: m.exp(x) * m.sum(m.sin(x)),
    "scalar": lambda m, x: m.sum(m.sin(x) * x),
    "linear": lambda m, x: x * 3.0,
}


def total(f):
    return lambda *xs: f(*xs).sum()


COMPOSITIONS = {
    "grad": lambda f: grad(total(f)),
    "grad of grad": lambda f: grad(lambda x: grad(total(f))(x).sum()),
    "third order": lambda f: grad(lambda x: (grad(lambda x: grad(total(f))(x).pow(2).sum())(x)).sum()),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": hessian,
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(f)),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f)),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f)),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x.cos(),)),
    "jvp of grad": lambda f: lambda x: jvp(grad(total(f)), (x,), (x.cos(),)),
    "grad of jvp": lambda f: grad(lambda x: jvp(f, (x,), (x.cos(),))[1].sum()),
    "vjp": lambda f: lambda x: vjp(f, x)[1](f(x).detach().cos()),
    "vmap": lambda f: lambda x: vmap(f)(torch.stack([x, x.cos()])),
    "nested vmap": lambda f: lambda x: vmap(vmap(f))(torch.stack([x, x.cos(), -x]).unsqueeze(1)),
    "vmap of grad": lambda f: lambda x: vmap(grad(total(f)))(torch.stack([x, x.cos()])),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(torch.stack([x, x.cos()])).sum()),
    "vmap of jacrev": lambda f: lambda x: vmap(jacrev(f))(torch.stack([x, x.cos()])),
    "vmap of jacfwd": lambda f: lambda x: vmap(jacfwd(f))(torch.stack([x, x.cos()])),
    "vmap of hessian": lambda f: lambda x: vmap(hessian(f))(torch.stack([x, x.cos()])),
    "jacrev of vmap": lambda f: lambda x: jacrev(vmap(f))(torch.stack([x, x.cos()])),
    "jacfwd of vmap": lambda f: lambda x: jacfwd(vmap(f))(torch.stack([x, x.cos()])),
    "vmap of jvp": lambda f: lambda x: vmap(lambda x, t: jvp(f, (x,), (t,)))(torch.stack([x, -x]), torch.stack([x, x])),
    "vmap of a vjp function": lambda f: lambda x: vmap(vjp(f, x)[1])(torch.stack([f(x), f(x).cos()])),
    "vmap of vmap of grad": lambda f: lambda x: vmap(vmap(grad(total(f))))(torch.stack([x, -x]).unsqueeze(0)),
    "vmap of grad of vmap": lambda f: lambda x: vmap(grad(lambda x: vmap(f)(x).sum()))(torch.stack([x, -x])[None]),
}
