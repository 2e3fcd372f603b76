"""The framework-free core: contract, registry, exchange, relay and front door."""
