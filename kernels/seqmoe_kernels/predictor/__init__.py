"""The network that forecasts expert use."""
