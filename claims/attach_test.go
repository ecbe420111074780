package claims_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// attach attaches to a key in the background.
func (p *process) attach(ctx context.Context, id string) (got chan claims.Claim) {
	got = make(chan claims.Claim, 1)
	go func() {
		defer close(got)
		c, err := p.keys.Attach(ctx, id)
		switch {
		case err == nil:
			got <- c
		case ctx.Err() == nil && !p.dead.Load() && !errors.Is(err, claims.ErrClosed):
			p.w.Error(err)
		}
	}()
	return got
}

// compete has a process claim a key whenever it is free, and work on it until it is told to return.
func (p *process) compete(ctx context.Context, id string) {
	go func() {
		for {
			got, err := p.keys.Claim(ctx, id)
			if err != nil {
				return
			}
			<-p.work(got[0], 0)
		}
	}()
}

func TestWhoAttachesToAKeyGetsItOnceTheFuncOfItsOwnerHasReturned(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		for i := range 5 {
			w.start(fmt.Sprint("other", i)).compete(w.Context(), "one")
		}
		free, err := b.keys.Attach(w.Context(), "a free one")
		require.NoError(w, err)
		require.True(w, b.keys.Holds(free))
		_, err = b.keys.Attach(w.Context(), "a free one")
		require.ErrorIs(w, err, tenure.ErrInvalid, "it has it")

		synctest.Wait()
		for _, of := range []*process{a, b, a, b} {
			began, before := time.Now(), w.begun()
			got := <-of.attach(w.Context(), "one")
			require.True(w, of.keys.Holds(got))
			require.Less(w, time.Since(began), attachedWithin)
			of.work(got, 0)
			synctest.Wait()
			require.Equal(w, before+1, w.begun(), "nobody else has worked on it meanwhile")
			time.Sleep(time.Minute)
		}
		slow := <-a.attach(w.Context(), "one")
		a.work(slow, 3*time.Second)
		began := time.Now()
		got := <-b.attach(w.Context(), "one")
		require.Equal(w, 3*time.Second, time.Since(began).Round(100*time.Millisecond))
		require.True(w, b.keys.Holds(got))
	})
}

// attachedWithin is how long Attach may take where nothing fails, in virtual time.
const attachedWithin = 100 * time.Millisecond

func (w *world) begun() int {
	w.jobs.mu.Lock()
	defer w.jobs.mu.Unlock()
	return w.jobs.begun
}

func TestAllWhoAttachToAKeyGetIt(t *testing.T) {
	inBubble(t, func(w *world) {
		w.start("owner").compete(w.Context(), "one")
		synctest.Wait()
		began := time.Now()
		var all sync.WaitGroup
		for i := range 5 {
			p := w.start(fmt.Sprint("p", i))
			all.Go(func() {
				c := <-p.attach(w.Context(), "one")
				p.work(c, 0)
			})
		}
		all.Wait()
		require.Less(w, time.Since(began), 5*time.Second)
	})
}

func TestAKeyIsFreeForAllOnceWhoWantedToAttachHasGone(t *testing.T) {
	for name, goes := range map[string]func(p *process, cancel func()){
		"it gave up": func(_ *process, cancel func()) { cancel() },
		"it closed":  func(p *process, _ func()) { p.stop() },
		"it crashed": func(p *process, _ func()) { p.crash() },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(w *world) {
				a, b, c := w.start("a"), w.start("b"), w.start("c")
				stopping := 3 * time.Second
				if name == "it crashed" {
					stopping = 2 * ttl
				}
				a.work(a.claimOne("one"), stopping)
				ctx, cancel := context.WithCancel(w.Context())
				defer cancel()
				b.attach(ctx, "one")
				time.Sleep(time.Second)
				goes(b, cancel)
				time.Sleep(stopping - time.Second - time.Millisecond)
				began := time.Now()
				c.wait("one")
				require.Less(w, time.Since(began), attachedWithin)
			})
		})
	}
}

// It has asked, and is cut off or paused when the owner offers the key.
func TestAKeyThatIsOfferedInVainIsFreeForAll(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b, c := w.start("a"), w.start("b"), w.start("c")
		a.work(a.claimOne("one"), 3*time.Second)
		got := b.attach(w.Context(), "one")
		time.Sleep(time.Second)
		b.fault(testkit.Refuse)
		began := time.Now()
		mine := c.wait("one")
		require.Greater(w, time.Since(began), 3*time.Second)
		require.Less(w, time.Since(began), 4500*time.Millisecond)
		c.work(mine, 0)
		b.fault(nil)
		require.True(w, b.keys.Holds(<-got), "c is asked, too")
	})
}

// What is offered to another process is not the owner's, either.
func TestAnOwnerDoesNotTakeBackWhatItOffers(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.work(a.claimOne("one"), 3*time.Second)
		b.attach(w.Context(), "one")
		time.Sleep(time.Second)
		b.fault(testkit.Refuse)
		time.Sleep(2*time.Second + time.Millisecond)
		var wishes atomic.Int64 // looks for wishes, as those that attach make them
		a.fault(func(ctx context.Context, call storetest.Call, send func(context.Context) error) error {
			if call.Op == "claims.look" && strings.HasPrefix(call.Key.Type, "tenure.") {
				wishes.Add(1)
			}
			return send(ctx)
		})
		began := time.Now()
		require.True(w, a.keys.Holds(<-a.attach(w.Context(), "one")))
		require.InDelta(w, 2*time.Second, time.Since(began), float64(500*time.Millisecond))
		require.Zero(w, wishes.Load(), "it does not ask itself")
		b.fault(nil)
		a.fault(nil)
	})
}

func TestAKeyWhoseOwnerCrashesGoesToWhoAttachesOnceItHasExpired(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.work(a.claimOne("one"), 0)
		a.crash()
		began := time.Now()
		require.True(w, b.keys.Holds(<-b.attach(w.Context(), "one")))
		require.LessOrEqual(w, time.Since(began), ttl+2*time.Second)
	})
}

func TestAnOwnerThatClosesLosesNoOneWhoAttaches(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.work(a.claimOne("one"), 3*time.Second)
		got := b.attach(w.Context(), "one")
		time.Sleep(time.Second)
		began := time.Now()
		a.stop()
		require.Less(w, time.Since(began), 3*time.Second)
		require.True(w, b.keys.Holds(<-got))
		require.Less(w, time.Since(began), 3*time.Second)
		require.Empty(w, w.owned(a.session.ID()))
	})
}

// Answers are lost: of the statements of the one that attaches, and of the owner's.
func TestAttachingSurvivesLostAnswers(t *testing.T) {
	for _, op := range []string{"wake", "claims.take", "claims.move", "claims.request", "claims.look", "claims.free"} {
		for _, who := range []string{"a", "b"} {
			t.Run(op+" of "+who, func(t *testing.T) {
				inBubble(t, func(w *world) {
					a, b := w.start("a"), w.start("b")
					a.work(a.claimOne("one"), time.Second)
					w.start("c").compete(w.Context(), "one")
					synctest.Wait()
					faulty := map[string]*process{"a": a, "b": b}[who]
					lost := testkit.LoseAnswer
					if op == "wake" {
						lost = testkit.Refuse
					}
					faulty.fault(testkit.Only(op, testkit.Once(lost)))
					began := time.Now()
					got := <-b.attach(w.Context(), "one")
					require.True(w, b.keys.Holds(got))
					b.work(got, 0)
					require.Less(w, time.Since(began), 3*time.Second)
					synctest.Wait()
					require.Equal(w, 2, w.begun(), "nobody else has worked on it meanwhile")
				})
			})
		}
	}
}

// The owners are of an older version: they free what others have asked for.
func TestWhoAttachesCompetesForWhatOlderOwnersFree(t *testing.T) {
	inBubble(t, func(w *world) {
		// Without delays that differ, virtual time may let the same process come first each time.
		slow := testkit.Only("claims.take", func(ctx context.Context, _ storetest.Call, send func(context.Context) error) error {
			time.Sleep(rand.N(5 * time.Millisecond))
			return send(ctx)
		})
		for i := range 3 {
			p := w.start(fmt.Sprint("old", i))
			p.fault(func(ctx context.Context, c storetest.Call, send func(context.Context) error) error {
				if c.Op == "claims.look" && c.Key.Type == "tenure.attach/tenant" {
					return testkit.Refuse(ctx, c, send)
				}
				return slow(ctx, c, send)
			})
			p.compete(w.Context(), "one")
		}
		time.Sleep(time.Second)
		b := w.start("b")
		b.fault(slow)
		began, before := time.Now(), w.begun()
		require.True(w, b.keys.Holds(<-b.attach(w.Context(), "one")))
		require.Less(w, time.Since(began), 10*time.Second)
		require.Less(w, w.begun()-before, 100)
	})
}

func TestADrainedProcessKeepsNoWish(t *testing.T) {
	inBubble(t, func(w *world) {
		a := w.start("a")
		a.work(a.claimOne("one"), time.Hour)
		drain := testkit.Must(tenure.NewDrain(w.store, "b", testkit.Quiet))
		ctx, cancel := context.WithCancel(w.Context())
		defer cancel()
		go drain.Run(ctx)
		var b *process
		b = w.startWith("b", claims.SessionConfig{Drain: drain, ReleaseRequested: func(c claims.Claim) {
			if err := b.keys.Release(context.Background(), c); err != nil {
				w.Error(err)
			}
		}})
		b.attach(ctx, "one")
		time.Sleep(time.Second)
		require.NoError(w, drain.Start(w.Context()))
		drained, done := context.WithTimeout(ctx, time.Minute)
		defer done()
		require.NoError(w, drain.Start(drained))
		require.Empty(w, w.owned(b.session.ID()))
		require.Equal(w, []claims.KindStatus{{Kind: "tenant"}}, b.session.Status().Kinds)
	})
}

// The row of the owner's claim must stay as it is: a transaction above READ COMMITTED that the claim fences would fail.
func TestAttachAsksOnceATTL(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.work(a.claimOne("one"), ttl*3/2)
		var requests atomic.Int32
		b.fault(testkit.Only("claims.request", func(ctx context.Context, _ storetest.Call, send func(context.Context) error) error {
			requests.Add(1)
			return send(ctx)
		}))
		<-b.attach(w.Context(), "one")
		require.LessOrEqual(w, requests.Load(), int32(2))
	})
}

func TestAttachReturnsOnceItsContextIsDone(t *testing.T) {
	inBubble(t, func(w *world) {
		a, b := w.start("a"), w.start("b")
		a.work(a.claimOne("one"), time.Hour)
		ctx, cancel := context.WithCancel(w.Context())
		got := b.attach(ctx, "one")
		time.Sleep(time.Second)
		b.fault(testkit.Only("claims.free", testkit.Hang))
		began := time.Now()
		cancel()
		<-got
		require.Less(w, time.Since(began), attachedWithin)
		b.fault(nil)
	})
}

// A func that panics has used its attempt, and it is not given to the next one for nothing.
func TestWhatFailedIsNotOffered(t *testing.T) {
	cfg := asked
	cfg.MaxAttempts, cfg.Exhausted = 2, "status = 'failed'"
	inRowsBubble(t, cfg, 1, func(w *rowsWorld) {
		a, b := w.start("a"), w.start("b")
		ofA, ofB := w.rowsOf(a, cfg), w.rowsOf(b, cfg)
		c := takeOf(w, ofA, 1)[0]
		go func() {
			defer func() { recover() }()
			_ = ofA.Do(context.Background(), c, func(ctx context.Context) error { <-ctx.Done(); panic("at the end") })
		}()
		synctest.Wait()
		c, err := ofB.Attach(w.Context(), "1")
		require.NoError(w, err)
		require.Equal(w, 2, c.Attempt)
	})
}

func TestNamesOfKindsThatAreTheLibrarysAreRefused(t *testing.T) {
	inBubble(t, func(w *world) {
		_, err := claims.NewKeys(w.start("a").session, "tenure.attach/tenant")
		require.ErrorIs(w, err, tenure.ErrInvalid)
		require.ErrorContains(w, err, `names that begin with "tenure." are this library's`)
	})
}

// Three and ten drivers compete for the rows, and each row has a func that takes a moment to return.
func TestWhoAttachesToARowGetsItFromAnyDriver(t *testing.T) {
	testkit.Slow(t)
	eachRowsServer(t, asked, func(db *rowsDB) {
		db.add(1, 20)
		var interrupted, begun atomic.Int32
		ctx, cancel := context.WithCancel(context.Background())
		var drivers sync.WaitGroup
		defer func() { cancel(); drivers.Wait() }()
		for range 3 {
			d := db.worker(claims.SessionConfig{}, asked)
			drivers.Go(func() {
				if err := d.rows.Serve(ctx, 20, func(ctx context.Context, c claims.Claim) error {
					begun.Add(1)
					<-ctx.Done()
					interrupted.Add(1)
					return context.Cause(ctx)
				}); err != nil {
					t := db.T
					t.Error(err)
				}
			})
		}
		testkit.Await(db.T, "all rows are driven", func() bool { return begun.Load() == 20 })
		b := db.worker(claims.SessionConfig{}, asked)
		for i := range 20 {
			began := time.Now()
			c, err := b.rows.Attach(db.Context(), fmt.Sprint(i+1))
			require.NoError(db, err)
			require.True(db, c.Row && b.rows.Holds(c))
			require.Equal(db, 1, c.Attempt, "that of the driver that was interrupted")
			require.EqualValues(db, i+1, interrupted.Load())
			require.EqualValues(db, 20, begun.Load(), "no driver has begun again")
			db.Logf("attached in %v", time.Since(began).Round(100*time.Microsecond))
			if i%2 == 0 {
				require.NoError(db, b.rows.Finish(db.Context(), c))
			}
		}
		_, err := b.rows.Attach(db.Context(), "2")
		require.ErrorIs(db, err, tenure.ErrInvalid, "it has it")
		_, err = b.rows.Attach(db.Context(), "1")
		require.ErrorIs(db, err, claims.ErrNotReady, "it is done")
		_, err = b.rows.Attach(db.Context(), "21")
		require.ErrorIs(db, err, tenure.ErrNotFound)
		_, err = b.rows.Attach(db.Context(), "")
		require.ErrorIs(db, err, tenure.ErrInvalid)
		_, err = db.worker(claims.SessionConfig{}, tasks).rows.Attach(db.Context(), "2")
		require.ErrorIs(db, err, tenure.ErrInvalid)
		require.ErrorContains(db, err, "set Requested")
	})
}

// A func that finishes its row although it was told to return.
func TestWhoAttachesToARowLearnsAtOnceThatItIsDone(t *testing.T) {
	inRowsBubble(t, asked, 1, func(w *rowsWorld) {
		a, b := w.start("a"), w.start("b")
		ofA, ofB := w.rowsOf(a, asked), w.rowsOf(b, asked)
		c := takeOf(w, ofA, 1)[0]
		go func() {
			_ = ofA.Do(context.Background(), c, func(ctx context.Context) error {
				<-ctx.Done()
				time.Sleep(3 * time.Second)
				return ofA.Finish(context.WithoutCancel(ctx), c)
			})
		}()
		synctest.Wait()
		began := time.Now()
		_, err := ofB.Attach(w.Context(), "1")
		require.ErrorIs(w, err, claims.ErrNotReady)
		require.Less(w, time.Since(began), 3*time.Second+2*attachedWithin)
		w.want(1, `status = 'done'`)
	})
}

func (w *rowsWorld) want(n int, where string) {
	w.Helper()
	require.Equal(w, n, w.count(`SELECT count(*) FROM tasks WHERE `+where))
}

// A row has an attempt for each driver that fails, and none for one that was told to return.
func TestAttachingCostsNoAttempt(t *testing.T) {
	cfg := asked
	cfg.MaxAttempts, cfg.Exhausted = 2, "status = 'failed'"
	inRowsBubble(t, cfg, 1, func(w *rowsWorld) {
		var of []*workedQueue
		for i := range 4 {
			of = append(of, w.rowsOf(w.start(fmt.Sprint("p", i)), cfg))
		}
		c := takeOf(w, of[0], 1)[0]
		for i, q := range slices.Concat(of[1:], of, of) {
			before := c
			owner := slices.Concat(of, of, of)[i]
			go func() {
				_ = owner.Do(context.Background(), before, func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) })
			}()
			synctest.Wait()
			var err error
			c, err = q.Attach(w.Context(), "1")
			require.NoError(w, err)
			require.Equal(w, 1, c.Attempt)
			require.Greater(w, c.Token, before.Token)
		}
	})
}
