package claims_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

var (
	simHours = flag.Float64("claims.hours", 0.5, "how many virtual hours of three processes under faults")
	simSeed  = flag.Uint64("claims.seed", 0, "of the faults; 0: any")
)

// S1, S3, S5: whatever becomes of what three processes send, no two run one key, no token repeats, and when the
// faults are over each key is claimed. TestSimulation does much more, but not with the statements of a real
// database.
func TestKeysUnderFaults(t *testing.T) {
	seed := *simSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	defer testkit.NoteFailure(t, fmt.Sprintf("go test ./claims -run TestKeysUnderFaults -claims.hours=%v -claims.seed=%d -count=50", *simHours, seed))
	inBubble(t, func(w *world) {
		random := rand.New(rand.NewPCG(seed, 1))
		ids := names(6)
		ctx, cancel := context.WithCancel(context.Background())
		var working sync.WaitGroup
		stop := func() { cancel(); working.Wait() }
		defer stop()
		var processes []*process
		for i := range 3 {
			p := w.start(fmt.Sprint("p", i))
			processes = append(processes, p)
			working.Go(func() { p.actors(ctx, ids) })
		}
		for end := time.Now().Add(time.Duration(*simHours * float64(time.Hour))); time.Now().Before(end); {
			time.Sleep(time.Duration(random.IntN(20000)) * time.Millisecond)
			processes[random.IntN(3)].fault(anyFault(random))
		}
		for _, p := range processes {
			p.fault(nil)
		}
		stop()
		// What it has claimed late is freed, and sessions expire.
		waiting, cancel := context.WithTimeout(context.Background(), 4*ttl)
		defer cancel()
		for last, got := w.start("last"), 0; got < len(ids); {
			claimed, err := last.keys.Claim(waiting, ids...)
			require.NoError(w, err, "%d keys without a func are not free", len(ids)-got)
			got += len(claimed)
		}
		time.Sleep(ttl) // until all has landed
		w.Logf("seed %d: %d funcs", seed, w.jobs.begun)
		require.Greater(w, float64(w.jobs.begun), *simHours*100)
	})
}

// actors runs a func for each key that the process gets, for some time.
func (p *process) actors(ctx context.Context, ids []string) {
	var running sync.WaitGroup
	defer running.Wait()
	for ctx.Err() == nil {
		got, err := p.keys.Claim(ctx, ids[rand.IntN(len(ids))])
		if err != nil && ctx.Err() == nil {
			p.w.Error(err)
		}
		for _, c := range got {
			running.Go(func() { p.act(ctx, c) })
		}
	}
}

func (p *process) act(ctx context.Context, c claims.Claim) {
	_ = p.keys.Do(ctx, c, func(ctx context.Context) error {
		p.begin(c)
		defer p.end(c)
		testkit.Sleep(ctx, rand.N(time.Minute))
		time.Sleep(rand.N(8 * time.Second)) // of the 9 s that a func has to return
		return nil
	})
}

// anyFault returns what becomes of calls.
func anyFault(random *rand.Rand) storetest.Hook {
	d := time.Duration(random.IntN(20000)) * time.Millisecond
	late := func(ctx context.Context, _ storetest.Call, do func(context.Context) error) error {
		go func() {
			time.Sleep(d)
			_ = do(context.WithoutCancel(ctx))
		}()
		return testkit.ErrReset
	}
	hooks := []storetest.Hook{
		nil, nil, nil, testkit.Hang, testkit.Refuse, testkit.LoseAnswer, late, testkit.Slowly(d / 10), testkit.AnswerAfter(d / 10),
		testkit.Only("claims.take", testkit.LoseAnswer), testkit.Only("claims.take", late), testkit.Only("claims.free", testkit.LoseAnswer), testkit.Only("claims.free", late), testkit.Only("put", testkit.Hang),
	}
	return hooks[random.IntN(len(hooks))]
}
