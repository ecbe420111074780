package tenure

import (
	"context"
	"time"
)

const confirmName = "fence predecessor"

// mustConfirm reports whether a term's job may not begin at once: the lease was
// taken over from a holder that had not released it.
func (c *Coordinator) mustConfirm(term *Term) bool {
	return term.predecessor != nil && (c.cfg.Confirmations > 0 || c.cfg.FencePredecessor != nil)
}

// confirm returns nil when the predecessor of a term is surely gone. It runs as a
// job's funcs do: its context ends with the term.
func (c *Coordinator) confirm(ctx context.Context, term *Term, k *keeper) error {
	began := time.Now()
	if k.confirmed != nil {
		select {
		case <-k.confirmed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for failures := 0; c.cfg.FencePredecessor != nil; failures++ {
		err := c.cfg.FencePredecessor(ctx, *term.predecessor)
		if err == nil {
			break
		}
		c.report("predecessor not fenced, trying again", err)
		if !sleep(ctx, c.retryPause(failures)) {
			return ctx.Err()
		}
	}
	c.log().Info("takeover confirmed", "predecessor", term.predecessor.Holder, "token", term.Token(), "took", time.Since(began))
	return nil
}
