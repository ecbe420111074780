package shards_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/verify/kit"
	"github.com/tenurelib/tenure/shards"
)

// Its session was lost, so nobody owns the shard, and nobody else can work for it.
func TestAFuncThatDoesNotReturnAfterItsSessionWasLostIsStuck(t *testing.T) {
	inBubble(t, 3, func(w *world) {
		hang := make(chan struct{})
		defer close(hang)
		p := w.start("p", func(p *process, _ *shards.Config) {
			p.run = func(ctx context.Context, id string) error {
				<-ctx.Done()
				if id == "1" {
					<-hang
				}
				return nil
			}
		})
		time.Sleep(settle + moment)
		p.fault(kit.Hang)
		time.Sleep(ttl)
		p.heal()
		time.Sleep(ttl)
		s := p.shards.Status()
		require.Equal(w, 3, s.Share)
		for _, one := range s.Shards {
			t.Logf("%+v", one)
		}
		require.Equal(w, 1, s.Stuck)
	})
}
