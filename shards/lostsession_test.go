package shards_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/shards"
)

// hanging makes the funcs of some shards return only when hang is closed. The others return when they are told.
func hanging(hang <-chan struct{}, ids ...string) func(*process, *shards.Config) {
	return func(p *process, _ *shards.Config) {
		p.run = func(ctx context.Context, id string) error {
			<-ctx.Done()
			if slices.Contains(ids, id) {
				<-hang
			}
			return nil
		}
	}
}

// Its session was lost, so no session owns the shard, and no other process can work for it.
func TestAFuncThatDoesNotReturnAfterItsSessionWasLostIsStuck(t *testing.T) {
	inBubble(t, 3, func(w *world) {
		hang := make(chan struct{})
		defer close(hang)
		p := w.start("p", hanging(hang, "1"))
		time.Sleep(settle + moment)
		p.fault(testkit.Hang)
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

// If it took part, the other process would give up just the shards that it has taken over, and none could work
// for them.
func TestAProcessWhoseFuncsHangAfterItsSessionWasLostGetsNothingFromOthers(t *testing.T) {
	inBubble(t, 4, func(w *world) {
		hang := make(chan struct{})
		q := w.start("q")
		time.Sleep(20 * time.Millisecond)
		p := w.start("p", hanging(hang, "0", "1", "2", "3"))
		time.Sleep(settle + moment)
		w.spread([]int{2, 2}, q, p)
		hung := p.runs()
		p.fault(testkit.Hang)
		time.Sleep(ttl - 5*time.Second)
		w.mu.Lock()
		for _, id := range hung { // they do nothing any more, and do not return
			delete(w.running, id)
		}
		w.mu.Unlock()
		time.Sleep(10 * time.Second)
		w.spread([]int{4}, q)
		p.heal()
		time.Sleep(10 * time.Minute)
		require.True(w, w.allRun())
		w.spread([]int{4}, q)
		require.Equal(w, 2, p.shards.Status().Stuck)
		close(hang)
		time.Sleep(settle + moment)
		w.spread([]int{2, 2}, q, p)
	})
}

// No other process is there, so its other shards run.
func TestAProcessThatIsAloneTakesPartAlthoughAFuncHangs(t *testing.T) {
	inBubble(t, 3, func(w *world) {
		hang := make(chan struct{})
		defer close(hang)
		p := w.start("p", hanging(hang, "1"))
		time.Sleep(settle + moment)
		p.fault(testkit.Hang)
		time.Sleep(ttl)
		p.heal()
		time.Sleep(settle + 5*time.Second)
		require.Equal(w, []string{"0", "1", "2"}, p.runs())
		var tokens []int64
		for _, one := range p.shards.Status().Shards {
			tokens = append(tokens, one.Token)
		}
		require.Len(w, tokens, 3)
		require.Greater(w, tokens[0], tokens[1], "it was claimed again")
		require.Greater(w, tokens[2], tokens[1])
	})
}
