"""Pictures of a recorded run. The only place that imports matplotlib; draws on Figure objects, never on pyplot."""
