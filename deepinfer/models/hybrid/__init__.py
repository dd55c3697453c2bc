"""Networks whose memory is of two kinds: paged compressed rows, and one state slot per request."""
