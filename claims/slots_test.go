package claims_test

import (
	"context"
	"flag"
	"fmt"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
)

func (p *process) slots(n int) *claims.Slots {
	p.w.Helper()
	s, err := claims.NewSlots(p.session, "gpu", n)
	require.NoError(p.w, err)
	return s
}

func mustTake(w *world, s *claims.Slots) claims.Claim {
	w.Helper()
	c, err := s.TryTake(w.Context())
	require.NoError(w, err)
	return c
}

// taking calls Take in a goroutine.
func taking(ctx context.Context, s *claims.Slots) chan claims.Claim {
	got := make(chan claims.Claim, 1)
	go func() {
		defer close(got)
		if c, err := s.Take(ctx); err == nil {
			got <- c
		}
	}()
	return got
}

func TestAtMostNSlotsAreTaken(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		ofA, ofB := a.slots(3), b.slots(3)
		numbers := make(map[int]bool)
		var last claims.Claim
		for _, s := range []*claims.Slots{ofA, ofB, ofA} {
			last = mustTake(w, s)
			require.True(w, s.Holds(last))
			numbers[s.Number(last)] = true
		}
		require.Equal(w, map[int]bool{0: true, 1: true, 2: true}, numbers)
		_, err := ofB.TryTake(w.Context())
		require.ErrorIs(w, err, tenure.ErrHeld)

		next := taking(w.Context(), ofB)
		require.NoError(w, ofA.Do(w.Context(), last, func(context.Context) error {
			synctest.Wait()
			require.Empty(w, next)
			return nil
		}))
		began := time.Now()
		c := <-next
		require.Less(w, time.Since(began), 10*time.Millisecond)
		require.Equal(w, ofA.Number(last), ofB.Number(c))
		require.Greater(w, c.Token, last.Token)
		require.False(w, ofA.Holds(last))
	})
}

func TestTheSlotThatWasTakenLongestAgoIsTaken(t *testing.T) {
	inBubble(t, func(w *world) {
		s := w.start("a").slots(3)
		var got []claims.Claim
		for range 3 {
			got = append(got, mustTake(w, s))
		}
		for _, i := range []int{2, 0, 1} {
			require.NoError(w, s.Release(w.Context(), got[i]))
		}
		for i := range 3 {
			require.Equal(w, s.Number(got[i]), s.Number(mustTake(w, s)))
		}
	})
}

func TestTheSlotOfACrashedProcessIsFreeAfterItsTTL(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		ofA, ofB := a.slots(1), b.slots(1)
		c := mustTake(w, ofA)
		next := taking(w.Context(), ofB)
		synctest.Wait()
		a.crash()
		began := time.Now()
		require.Greater(w, (<-next).Token, c.Token)
		require.LessOrEqual(w, time.Since(began), ttl+20*time.Millisecond)
	})
}

func TestCallsOfAProcessGetSlotsInTheirOrder(t *testing.T) {
	inBubble(t, func(w *world) {
		s := w.start("a").slots(1)
		c := mustTake(w, s)
		order := make(chan int, 10)
		var calls sync.WaitGroup
		defer calls.Wait()
		for i := range 10 {
			calls.Go(func() {
				c, err := s.Take(w.Context())
				if err != nil {
					w.Error(err)
					return
				}
				order <- i
				if err := s.Release(w.Context(), c); err != nil {
					w.Error(err)
				}
			})
			synctest.Wait()
		}
		require.NoError(w, s.Release(w.Context(), c))
		for i := range 10 {
			require.Equal(w, i, <-order)
		}
	})
}

// A deployment lowers the number: a has not been replaced yet.
func TestALowerNumberAppliesAsSlotsBecomeFree(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		ofA, ofB := a.slots(3), b.slots(1)
		var got []claims.Claim
		for range 3 {
			got = append(got, mustTake(w, ofA))
		}
		released := make(chan error, 1)
		go func() {
			released <- ofA.Do(w.Context(), got[2], func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) })
		}()
		synctest.Wait()
		require.NoError(w, ofB.RequestRelease(w.Context(), ofA.Number(got[2])))
		require.ErrorIs(w, <-released, tenure.ErrResigned)
		require.NoError(w, ofA.Release(w.Context(), got[1]))
		_, err := ofB.TryTake(w.Context())
		require.ErrorIs(w, err, tenure.ErrHeld, "slots 1 and 2 are free, and for b there is only slot 0")

		next := taking(w.Context(), ofB)
		synctest.Wait()
		began := time.Now()
		require.NoError(w, ofA.Release(w.Context(), got[0]))
		require.Equal(w, 0, ofB.Number(<-next))
		require.Less(w, time.Since(began), 10*time.Millisecond, "it is woken")
	})
}

// A process that has just freed a slot is not ahead of one that waits.
func TestProcessesHaveTheSameChance(t *testing.T) {
	inBubble(t, func(w *world) {
		const rounds = 200
		var left atomic.Int64
		left.Store(rounds)
		var took [2]int
		var working sync.WaitGroup
		for i, name := range []string{"a", "b"} {
			s := w.start(name).slots(1)
			working.Go(func() {
				for left.Add(-1) >= 0 {
					c, err := s.Take(w.Context())
					if err == nil {
						time.Sleep(10 * time.Millisecond)
						took[i]++
						err = s.Release(w.Context(), c)
					}
					if err != nil {
						w.Error(err)
					}
				}
			})
		}
		working.Wait()
		require.Greater(w, min(took[0], took[1]), rounds/4)
	})
}

// If the database refuses one of the slots, one of the others is taken, and not several.
func TestASlotThatTheDatabaseRefusesIsLeft(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		s := a.slots(4)
		var got []claims.Claim
		for range 4 {
			got = append(got, mustTake(w, s))
		}
		require.NoError(w, s.Release(w.Context(), got...))
		testkit.ExecSQL(t, w.store.(*tenure.SQLiteStore).DB(), `CREATE TRIGGER refuses BEFORE UPDATE ON objects_claims
			WHEN NEW.id = '0' AND NEW.session IS NOT NULL BEGIN SELECT RAISE(ABORT, 'not this one'); END`)
		require.Equal(w, 1, s.Number(mustTake(w, s)))
		require.Len(w, w.owned(a.session.ID()), 1)
	})
}

func TestSlotsThatCannotBe(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		for _, n := range []int{-1, 0, 1001} {
			_, err := claims.NewSlots(a.session, "gpu", n)
			require.ErrorIs(w, err, tenure.ErrInvalid)
			require.ErrorContains(w, err, "1 to 1000")
		}
		_, err := claims.NewSlots(a.session, "", 1)
		require.ErrorIs(w, err, tenure.ErrInvalid)
		_, err = claims.NewSlots(nil, "gpu", 1)
		require.ErrorIs(w, err, tenure.ErrInvalid)
		s := a.slots(1)
		_, err = claims.NewSlots(a.session, "gpu", 1)
		require.ErrorIs(w, err, tenure.ErrInvalid, "there are some of that name")
		require.ErrorIs(w, s.RequestRelease(w.Context()), tenure.ErrInvalid)

		ctx, cancel := context.WithCancel(w.Context())
		cancel()
		c := mustTake(w, s)
		_, err = s.Take(ctx)
		require.ErrorIs(w, err, context.Canceled)
		require.NoError(w, s.Detach(c))
		require.False(w, s.Holds(c))
		_, err = s.TryTake(w.Context())
		require.ErrorIs(w, err, tenure.ErrHeld, "another process may use it")
		a.stop()
		_, err = s.Take(w.Context())
		require.ErrorIs(w, err, claims.ErrClosed)
	})
}

// A take whose answer is lost neither keeps a slot nor gives it away twice.
func TestASlotWhoseAnswerIsLostIsTakenAgain(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		ofA, ofB := a.slots(1), b.slots(1)
		require.NoError(w, ofA.Release(w.Context(), mustTake(w, ofA)))
		a.fault(testkit.Once(testkit.Only("claims.take", testkit.LoseAnswer)))
		c, err := ofA.Take(w.Context())
		require.NoError(w, err)
		_, err = ofB.TryTake(w.Context())
		require.ErrorIs(w, err, tenure.ErrHeld)
		require.NoError(w, ofA.Release(w.Context(), c))
		mustTake(w, ofB)
	})
}

// One statement takes a slot, one frees it, and a process that waits sends one each time.
func TestStatementsOfSlots(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		ofA, ofB := a.slots(1), b.slots(1)
		c := mustTake(w, ofA)
		require.NoError(w, ofA.Release(w.Context(), c))
		var traffic testkit.Calls
		a.fault(traffic.Count("", nil))
		c = mustTake(w, ofA)
		require.NoError(w, ofA.Release(w.Context(), c))
		sent := traffic.Take()
		require.Equal(w, 1, sent["claims.take"])
		require.Equal(w, 1, sent["claims.free"])
		require.Zero(w, sent["claims.look"])

		other := w.start("c")
		other.fault(traffic.Count("", nil))
		ofC := other.slots(1)
		c = mustTake(w, ofB)
		ctx, cancel := context.WithCancel(w.Context())
		gotA, gotC := taking(ctx, ofA), taking(ctx, ofC)
		time.Sleep(10 * time.Millisecond)
		traffic.Take()
		require.NoError(w, ofB.Release(w.Context(), c))
		select {
		case <-gotA:
		case <-gotC:
		}
		time.Sleep(10 * time.Millisecond)
		sent = traffic.Take()
		require.Equal(w, 2, sent["claims.take"], "of two that wait, one gets it")
		require.Zero(w, sent["claims.look"])
		cancel()
	})
}

var slotTakes = flag.Int("slots.takes", 2000, "how many slots TestSlotsUnderLoad takes on each database")

// Eight processes with five waiting callers each share four slots.
func TestSlotsUnderLoad(t *testing.T) {
	testkit.Slow(t)
	for name, open := range map[string]func(t *testing.T) tenure.Database{
		"postgres": func(t *testing.T) tenure.Database {
			return testkit.OpenPostgres(t, testkit.PostgresURL(t), tenure.PostgresConfig{})
		},
		"sqlite": func(t *testing.T) tenure.Database {
			return testkit.OpenSQLite(t, filepath.Join(t.TempDir(), "tenure.db"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			const processes, callers, n = 8, 5, 4
			w := newWorld(t, open(t))
			var held [n]atomic.Int64
			var tokens [n]atomic.Int64
			var took [processes]atomic.Int64
			var left atomic.Int64
			left.Store(int64(*slotTakes))
			var freed [n]atomic.Int64
			var mu sync.Mutex
			var gaps []time.Duration // from a release to the next claim
			var working sync.WaitGroup
			for i := range processes {
				s := w.start(fmt.Sprint("p", i)).slots(n)
				for range callers {
					working.Go(func() {
						for left.Add(-1) >= 0 {
							c, err := s.Take(t.Context())
							if err != nil {
								t.Error(err)
								return
							}
							number := s.Number(c)
							if at := freed[number].Load(); at != 0 {
								mu.Lock()
								gaps = append(gaps, time.Since(time.UnixMicro(at)))
								mu.Unlock()
							}
							if others := held[number].Add(1); others != 1 {
								t.Errorf("slot %d is held %d times", number, others)
							}
							if last := tokens[number].Swap(c.Token); last >= c.Token {
								t.Errorf("slot %d has token %d after %d", number, c.Token, last)
							}
							took[i].Add(1)
							time.Sleep(time.Millisecond)
							held[number].Add(-1)
							freed[number].Store(time.Now().UnixMicro())
							if err := s.Release(t.Context(), c); err != nil {
								t.Error(err)
							}
						}
					})
				}
			}
			working.Wait()
			shares := ""
			for i := range took {
				shares += " " + strconv.Itoa(int(took[i].Load()))
				if share := took[i].Load(); share < int64(*slotTakes)/processes/4 {
					t.Errorf("p%d took %d of %d", i, share, *slotTakes)
				}
			}
			t.Logf("%d takes of %d processes:%s; from a release to the next holder p50 %v, p99 %v", *slotTakes, processes, shares, testkit.Percentile(gaps, 50), testkit.Percentile(gaps, 99))
		})
	}
}

// The recipe for IDs in the documents adds up the database's clock, in the token, and the process's.
func TestAnOwnerWhoseClockIsFastUsesNoTimeOfItsSuccessor(t *testing.T) {
	const token = int64(1_800_000_000_000_000)
	for _, faster := range []float64{0.97, 1, 1.001, 1.03} {
		for passed := time.Millisecond; passed < 10*365*24*time.Hour; passed *= 3 { // by the database's clock
			last := timeOf(token, time.Duration(float64(passed)*faster))
			successor := token + passed.Microseconds()
			require.LessOrEqual(t, last, successor/1000, "%v at %v", passed, faster)
			require.GreaterOrEqual(t, timeOf(token, passed), (token+passed.Microseconds()*29/30)/1000-1)
		}
	}
}
