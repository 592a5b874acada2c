"""Every check before a run: data, model, template, packing, servers. A fault found here costs seconds."""
