"""The gated delta rule: a linear attention whose memory of a sequence is one matrix a head."""
