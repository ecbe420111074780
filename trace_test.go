package tenure_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/storetest"
)

// tale records the trace's calls in order. Repeated calls in a row are recorded once, because
// how often a standby looks is random.
type tale struct{ script }

func (s *tale) tell(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	line := fmt.Sprintf(format, args...)
	if n := len(s.lines); n == 0 || s.lines[n-1] != line {
		s.lines = append(s.lines, line)
	}
}

// since returns what was told since the last call.
func (s *tale) since() []string {
	synctest.Wait() // it is told a moment later
	s.mu.Lock()
	defer s.mu.Unlock()
	lines := s.lines
	s.lines = nil
	return lines
}

func (s *tale) trace() *tenure.Trace {
	return &tenure.Trace{
		Attempt: func(_ time.Duration, err error) {
			switch {
			case err == nil:
				s.tell("attempt: got it")
			case errors.Is(err, tenure.ErrHeld):
				s.tell("attempt: held")
			default:
				s.tell("attempt: error")
			}
		},
		Acquired: func(_ *tenure.Term, predecessor *tenure.Holding) {
			if predecessor != nil {
				s.tell("stolen from %s", predecessor.Holder)
				return
			}
			s.tell("acquired")
		},
		Renewed: func(_ *tenure.Term, took, trustLeft time.Duration) {
			s.tell("renewed in %v, with %v left", took, trustLeft)
		},
		RenewalFailed: func(_ *tenure.Term, err error, _ time.Duration) { s.tell("renewal failed: %v", err) },
		Lost:          func(_ *tenure.Term, cause error) { s.tell("lost: %v", cause) },
		Released:      func(_ *tenure.Term, cause error) { s.tell("released: %v", cause) },
		JobStarted:    func(*tenure.Term) { s.tell("job started") },
		JobEnded: func(_ *tenure.Term, cause error, took time.Duration) {
			s.tell("job ended after %v: %v", took, cause)
		},
		JobStuck: func(_ *tenure.Term, since time.Duration) { s.tell("job stuck for %v", since) },
	}
}

func TestATraceIsToldTheWholeLifeOfALeaseInOrder(t *testing.T) {
	inBubble(t, func(t *scene) {
		var ofA, ofB tale
		a := t.start("a", tenure.CoordinatorConfig{Reconcile: returnsAfter(6 * time.Second), Trace: ofA.trace()})
		require.Equal(t, []string{"attempt: got it", "acquired", "job started"}, ofA.since())

		b := t.start("b", tenure.CoordinatorConfig{Trace: ofB.trace()})
		a.store.SetHook(testkit.Slowly(30 * time.Millisecond))
		time.Sleep(11 * time.Second)
		require.Equal(t, []string{"renewed in 30ms, with 18.97s left"}, ofA.since())
		require.Equal(t, []string{"attempt: held"}, ofB.since())

		a.store.SetHook(testkit.Refuse)
		time.Sleep(14 * time.Second)
		require.Equal(t, []string{"renewal failed: connection refused"}, ofA.since())

		a.store.SetHook(nil)
		time.Sleep(5 * time.Second)
		got := ofA.since()
		require.Len(t, got, 1)
		require.Contains(t, got[0], "renewed in 0s, with ")

		a.store.SetHook(testkit.Refuse)
		time.Sleep(70 * time.Second)
		require.Equal(t, []string{"renewal failed: connection refused", "lost: lease not renewed in time", "renewal failed: connection refused",
			"job ended after 6s: lease not renewed in time", "attempt: error"}, ofA.since())
		require.Equal(t, []string{"attempt: held", "attempt: got it", "stolen from a", "job started", "renewed in 0s, with 19s left"}, ofB.since())

		a.store.SetHook(nil)
		time.Sleep(40 * time.Second)
		require.Equal(t, []string{"attempt: held"}, ofA.since())

		require.NoError(t, b.Resign(t.Context()))
		time.Sleep(4 * time.Millisecond) // a, whose last term it lost, gives others a head start
		synctest.Wait()
		require.Equal(t, []string{"renewed in 0s, with 19s left", "job ended after 0s: lease resigned", "released: lease resigned"}, ofB.since())
		require.Equal(t, []string{"attempt: got it", "acquired", "job started"}, ofA.since())

		a.stop()
		require.Equal(t, []string{"job ended after 6s: replica is shutting down", "released: replica is shutting down"}, ofA.since())
	})
}

func TestATraceIsToldHowATermEnds(t *testing.T) {
	for name, test := range map[string]struct {
		takes time.Duration // of the job, to return
		end   func(t *scene, a *replica)
		want  []string
	}{
		"lost to another": {time.Second, func(t *scene, _ *replica) {
			putRecord(t, t.store, robbersRecord)
			time.Sleep(20 * time.Second)
		}, []string{
			"lost: lease lost: reconciler_lease/singleton is held by robber",
			"job ended after 1s: lease lost: reconciler_lease/singleton is held by robber", "attempt: held"}},
		"job stuck": {time.Minute, func(t *scene, a *replica) { require.NoError(t, a.Resign(t.Context())) }, []string{
			"job stuck for 9s", "job ended after 1m0s: lease resigned", "released: lease resigned"}},
		"not released": {0, func(_ *scene, a *replica) { a.store.SetHook(testkit.Refuse); a.stop() }, []string{
			"job ended after 0s: replica is shutting down", "lost: replica is shutting down\nconnection refused"}},
		"released after its deadline": {0, func(_ *scene, a *replica) {
			a.store.SetHook(testkit.Only("put", testkit.Refuse))
			time.Sleep(21 * time.Second)
		}, []string{
			"renewal failed: connection refused", "lost: lease not renewed in time", "job ended after 0s: lease not renewed in time",
			"released: lease not renewed in time"}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				var told tale
				a := t.start("a", tenure.CoordinatorConfig{Reconcile: returnsAfter(test.takes), Trace: told.trace()})
				told.since()
				test.end(t, a)
				require.Equal(t, test.want, told.since())
			})
		})
	}
}

func TestATraceIsToldOfAJobThatPanics(t *testing.T) {
	inBubble(t, func(t *scene) {
		var told tale
		c, err := tenure.NewCoordinator(testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}), tenure.CoordinatorConfig{
			Reconcile: func(context.Context) error { panic("broken") },
			Trace:     told.trace(),
		})
		require.NoError(t, err)
		require.Panics(t, func() { c.Run(t.Context()) })
		require.Equal(t, []string{"attempt: got it", "acquired", "job started",
			"job ended after 0s: job ended: it panicked: broken", "released: job ended: it panicked: broken"}, told.since())
	})
}

func TestATraceIsToldNothingOfAJobThatDidNotBegin(t *testing.T) {
	inBubble(t, func(t *scene) {
		var told tale
		t.store = storetest.Faulty(t.store, testkit.Slowly(time.Second))
		t.start("a", tenure.CoordinatorConfig{Trace: told.trace()}).stop()
		require.Equal(t, []string{"attempt: got it"}, told.since(), "shut down while it acquires")
	})
	inBubble(t, func(t *scene) {
		var told tale
		_, b := t.takeover(tenure.CoordinatorConfig{Confirmations: 3, Trace: told.trace()})
		told.since()
		b.stop()
		require.Equal(t, []string{"released: replica is shutting down"}, told.since(), "shut down while it confirms")
	})
}

func TestTheStatusShowsToATraceWhatItIsTold(t *testing.T) {
	inBubble(t, func(t *scene) {
		var c *tenure.Coordinator
		var seen []string
		note := func(what string) { // the coordinator may have moved on by now
			seen = append(seen, what)
			switch role := c.Status().Role; what {
			case "acquired":
				require.GreaterOrEqual(t, role, tenure.RoleConfirming)
			case "job started":
				require.Equal(t, tenure.RoleHolder, role)
			default:
				require.Contains(t, []tenure.Role{tenure.RoleStopping, tenure.RoleStandby}, role)
			}
		}
		c, err := tenure.NewCoordinator(testkit.NewLease(t, t.store, tenure.LeaseConfig{Holder: "a"}), tenure.CoordinatorConfig{
			Trace: &tenure.Trace{
				Acquired:   func(*tenure.Term, *tenure.Holding) { note("acquired") },
				JobStarted: func(*tenure.Term) { note("job started") },
				JobEnded:   func(*tenure.Term, error, time.Duration) { note("job ended") },
				Released:   func(*tenure.Term, error) { note("released") },
			},
		})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.NoError(t, c.Run(ctx))
		require.Equal(t, []string{"acquired", "job started", "job ended", "released"}, seen)
	})
}

// journal counts the lines of a log at or above a level, by their text.
type journal struct {
	mu      sync.Mutex
	lines   map[string]int
	unnamed []string // lines of level info without a replica or a holder
}

func (j *journal) logger(level slog.Level) *slog.Logger {
	return slog.New(journalHandler{j, level, nil})
}

type journalHandler struct {
	*journal
	level slog.Level
	attrs []slog.Attr
}

func (h journalHandler) Enabled(_ context.Context, level slog.Level) bool { return level >= h.level }
func (h journalHandler) WithGroup(string) slog.Handler                    { panic("no groups are used") }
func (h journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	h.attrs = slices.Concat(h.attrs, attrs)
	return h
}

func (h journalHandler) Handle(_ context.Context, r slog.Record) error {
	values := map[string]string{}
	for _, a := range h.attrs {
		values[a.Key] = a.Value.String()
	}
	r.Attrs(func(a slog.Attr) bool { values[a.Key] = a.Value.String(); return true })
	line := r.Level.String() + " " + r.Message + " by " + values["replica"]
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lines == nil {
		h.lines = map[string]int{}
	}
	h.lines[line]++
	_, held := values["holder"]
	if r.Level == slog.LevelInfo && (values["replica"] == "" || !held) {
		h.unnamed = append(h.unnamed, line)
	}
	return nil
}

// take returns the lines since the last call.
func (j *journal) take() map[string]int {
	synctest.Wait() // a line comes a moment later
	j.mu.Lock()
	defer j.mu.Unlock()
	lines := j.lines
	j.lines = nil
	return lines
}

func TestALostTermIsOneWarning(t *testing.T) {
	inBubble(t, func(t *scene) {
		var j journal
		logged := tenure.CoordinatorConfig{Logger: j.logger(slog.LevelInfo)}
		slow := logged
		slow.Watch = func(ctx context.Context) error {
			<-ctx.Done()
			time.Sleep(14 * time.Second) // until b works
			return nil
		}
		a := t.start("a", slow)
		t.start("b", logged)
		a.store.SetHook(testkit.Refuse)
		time.Sleep(31 * time.Second)
		a.store.SetHook(nil)
		time.Sleep(time.Minute)
		lines := j.take()
		require.Equal(t, 1, lines["WARN lease lost by a"], lines)
		require.Equal(t, 1, lines["INFO lease lost before it was released by a"], lines)
	})
}

func TestTheLogHasOneLineForEachChangeAndNoneForAPoll(t *testing.T) {
	inBubble(t, func(t *scene) {
		var j journal
		t.store = testkit.Bare(t.store) // so that standbys poll
		logged := tenure.CoordinatorConfig{Logger: j.logger(slog.LevelInfo)}
		a, b := t.start("a", logged), t.start("b", logged)
		require.Equal(t, map[string]int{"INFO lease acquired by a": 1, "INFO lease has another holder by b": 1}, j.take())
		time.Sleep(time.Hour)
		require.Empty(t, j.take())

		a.store.SetHook(testkit.Refuse)
		time.Sleep(time.Hour)
		require.Equal(t, map[string]int{
			"WARN failed to renew lease; retrying by a": 1,
			"WARN lease lost by a":                      1,
			"INFO lease acquired by b":                  1,
		}, j.take())
		a.store.SetHook(nil)
		time.Sleep(time.Hour)
		require.Equal(t, map[string]int{"INFO lease has another holder by a": 1}, j.take())

		require.NoError(t, b.Resign(t.Context()))
		time.Sleep(time.Hour)
		require.Equal(t, map[string]int{
			"INFO lease released by b":           1,
			"INFO lease acquired by a":           1,
			"INFO lease has another holder by b": 1,
		}, j.take())
		require.Empty(t, j.unnamed)
	})
}

// textLog returns a logger without times, and a func that returns its lines since the last call.
func textLog() (*slog.Logger, func() string) {
	var text testkit.SyncBuffer
	read := 0
	return slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}})), func() string {
			all := text.String()
			defer func() { read = len(all) }()
			return all[read:]
		}
}

func TestTheLogTellsATakeoverFromAnAcquireOfAFreeLease(t *testing.T) {
	inBubble(t, func(t *scene) {
		log, lines := textLog()
		t.takeover(tenure.CoordinatorConfig{Logger: log})
		require.Regexp(t, `level=INFO msg="lease acquired" .*holder=b token=\d+ from=a reason=expired\n`, lines())
	})
	inBubble(t, func(t *scene) {
		log, lines := textLog()
		t.start("a", tenure.CoordinatorConfig{Logger: log})
		require.NotContains(t, lines(), "from=")
	})
}

func TestTheLogTellsToWhomALeaseIsOffered(t *testing.T) {
	inBubble(t, func(t *scene) {
		log, lines := textLog()
		a, _ := t.start("a"), t.start("c", tenure.CoordinatorConfig{Logger: log})
		lines()
		require.NoError(t, a.lease.RequestHandover(t.Context(), "b")) // which does not run
		synctest.Wait()
		time.Sleep(10 * time.Millisecond)
		require.Equal(t, "level=INFO msg=\"lease is offered to a replica\" lease=reconciler_lease/singleton replica=c offered_to=b\n", lines())
	})
}

func TestTheLogTellsHowLongALeaseWasNotRenewed(t *testing.T) {
	inBubble(t, func(t *scene) {
		log, lines := textLog()
		a := t.start("a", tenure.CoordinatorConfig{Logger: log})
		a.store.SetHook(testkit.Refuse)
		time.Sleep(16 * time.Second) // the renewal is due after 10 s
		a.store.SetHook(nil)
		lines()
		time.Sleep(time.Hour)
		found := regexp.MustCompile(`^level=INFO msg="lease renewed again" lease=reconciler_lease/singleton replica=a holder=a token=\d+ after=(\S+)\n$`).FindStringSubmatch(lines())
		require.NotNil(t, found)
		after, err := time.ParseDuration(found[1])
		require.NoError(t, err)
		require.True(t, after >= 6*time.Second && after < 10*time.Second, "%v", after) // the deadline is at 20 s
	})
}

func TestACauseIsOneLineOfTheLog(t *testing.T) {
	inBubble(t, func(t *scene) {
		log, lines := textLog()
		down := errors.New("failed to connect to `host=db`:\n\t127.0.0.1:5432 (db): dial error\n\t[::1]:5432 (db): dial error")
		t.store = storetest.Faulty(t.store, func(context.Context, storetest.Call, func(context.Context) error) error { return down })
		a := t.start("a", tenure.CoordinatorConfig{Logger: log})
		const want = "failed to connect to `host=db`: 127.0.0.1:5432 (db): dial error; [::1]:5432 (db): dial error"
		require.Contains(t, lines(), `error="`+want+`"`)
		require.Equal(t, want, a.Status().LastError)
	})
	inBubble(t, func(t *scene) {
		log, lines := textLog()
		a := t.start("a", tenure.CoordinatorConfig{Logger: log, Reconcile: func(context.Context) error {
			return errors.Join(errors.New("no table"), errors.New("no index"))
		}})
		time.Sleep(time.Second)
		require.Contains(t, lines(), `cause="job ended: no table; no index"`)
		require.Equal(t, "job ended: no table; no index", a.Status().Reason)
		require.Equal(t, "no table; no index", a.Status().Runs[0].LastError)
	})
	inBubble(t, func(t *scene) {
		a := t.start("a", tenure.CoordinatorConfig{
			Watch:     func(ctx context.Context) error { <-ctx.Done(); return nil },
			Reconcile: func(context.Context) error { return errors.New("no table") },
		})
		time.Sleep(time.Second)
		require.Equal(t, "job ended: reconcile: no table", a.Status().Reason, "which of the two")
	})
}

// docs/operations.md shows it.
func TestTheReplicaCanBeLoggedUnderAnotherNameToo(t *testing.T) {
	inBubble(t, func(t *scene) {
		log, lines := textLog()
		name := "a"
		t.startWith(tenure.LeaseConfig{Holder: name, Logger: log.With("replica_id", name)}, tenure.CoordinatorConfig{}).stop()
		got := lines()
		require.NotEmpty(t, got)
		require.Equal(t, strings.Count(got, "\n"), strings.Count(got, " replica_id=a lease=reconciler_lease/singleton replica=a "), got)
	})
}

func TestAttemptsAreLoggedAtLevelDebug(t *testing.T) {
	inBubble(t, func(t *scene) {
		var j journal
		t.store = testkit.Bare(t.store)
		t.start("a", tenure.CoordinatorConfig{Logger: testkit.Quiet})
		t.start("b", tenure.CoordinatorConfig{Logger: j.logger(slog.LevelDebug)})
		time.Sleep(time.Minute)
		require.InDelta(t, 16, j.take()["DEBUG lease is held by b"], 4, "one each 5 s, jittered")
	})
}

func TestAnErrorWhosePortDiffersEachTimeIsLoggedOnce(t *testing.T) {
	inBubble(t, func(t *scene) {
		var j journal
		var port atomic.Int32
		t.store = storetest.Faulty(t.store, func(context.Context, storetest.Call, func(context.Context) error) error {
			return fmt.Errorf("read tcp 127.0.0.1:%d: connection reset by peer", 40000+port.Add(1))
		})
		t.start("a", tenure.CoordinatorConfig{Logger: j.logger(slog.LevelWarn)})
		time.Sleep(time.Minute)
		require.GreaterOrEqual(t, port.Load(), int32(10))
		require.Equal(t, map[string]int{"WARN failed to acquire lease by a": 1}, j.take())
	})
}

// A balancer resets connections, and the server behind it is restarted.
func TestAnOutageIsLoggedOnceThoughItsTextsAlternate(t *testing.T) {
	inBubble(t, func(t *scene) {
		var j journal
		outage := []error{
			&net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET}, io.ErrUnexpectedEOF, &net.OpError{Op: "write", Net: "tcp", Err: syscall.EPIPE},
			&net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}, &pgconn.PgError{Code: "57P03", Message: "the database system is starting up"},
		}
		var calls atomic.Int32
		down := func(context.Context, storetest.Call, func(context.Context) error) error {
			return outage[int(calls.Add(1))%len(outage)]
		}
		a := t.start("a", tenure.CoordinatorConfig{Logger: j.logger(slog.LevelWarn)})
		for range 2 { // a second outage is a new one
			a.store.SetHook(down)
			time.Sleep(9 * time.Minute)
			require.Equal(t, map[string]int{"WARN failed to renew lease; retrying by a": 1, "WARN lease lost by a": 1}, j.take())
			a.store.SetHook(nil)
			time.Sleep(time.Minute)
			require.True(t, a.IsHolder())
			require.Empty(t, a.Status().LastError)
		}
		require.GreaterOrEqual(t, calls.Load(), int32(50))
	})
}

// The others wait for a TTL, and the renewals that failed before do not say why.
func TestALeaseThatExpiresBecauseItWasNotReleasedIsLoggedDuringAnOutageToo(t *testing.T) {
	inBubble(t, func(t *scene) {
		var j journal
		a := t.start("a", tenure.CoordinatorConfig{Logger: j.logger(slog.LevelWarn)})
		a.store.SetHook(func(context.Context, storetest.Call, func(context.Context) error) error { return io.ErrUnexpectedEOF })
		time.Sleep(15 * time.Second) // a renewal has failed, and more can follow
		a.stop()
		require.Equal(t, map[string]int{"WARN failed to renew lease; retrying by a": 1, "WARN failed to release lease; it will expire by a": 1}, j.take())
	})
}

func TestErrorsThatAlternateAreLoggedOnceEach(t *testing.T) {
	inBubble(t, func(t *scene) {
		var j journal
		errs := []error{&pgconn.PgError{Code: "55P03", Message: "locked"}, errors.New("anything else")}
		var calls atomic.Int32
		t.store = storetest.Faulty(t.store, func(context.Context, storetest.Call, func(context.Context) error) error {
			return errs[int(calls.Add(1))%len(errs)]
		})
		t.start("a", tenure.CoordinatorConfig{Logger: j.logger(slog.LevelWarn)})
		time.Sleep(9 * time.Minute)
		require.Equal(t, map[string]int{"WARN failed to acquire lease by a": 2}, j.take())
	})
}

func TestAnErrorThatIsANilPointerEndsATermInOrder(t *testing.T) {
	null := func(context.Context) error { return (*url.Error)(nil) }
	for name, cfg := range map[string]tenure.CoordinatorConfig{
		"reconcile": {Reconcile: null},
		"sweep":     {Reconcile: tenure.Every(time.Second, null)},
		"check": {Check: func(ctx context.Context, role tenure.Role) error {
			if role == tenure.RoleHolder {
				return null(ctx)
			}
			return nil
		}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *scene) {
				a := t.start("a", cfg)
				time.Sleep(time.Minute)
				require.NotZero(t, a.Status().Terms)
			})
		})
	}
}

// Users of package claims don't know that a session is a lease.
func TestTheLogOfASessionsLeaseSpeaksOfTheSession(t *testing.T) {
	inBubble(t, func(t *scene) {
		log, lines := textLog()
		testkit.Put(t, t.store, tenure.Object{Key: claims.SessionKey("s1"), Payload: []byte("junk")})
		lease := testkit.NewLease(t, t.store, tenure.LeaseConfig{Key: claims.SessionKey("s1"), Holder: "a", Logger: log})
		_, err := lease.Read(t.Context())
		require.NoError(t, err)
		synctest.Wait()
		require.Equal(t, 1, strings.Count(lines(), `msg="record of the session cannot be decoded; it counts as held by unknown until it expires" session=s1 replica=a`))
		obj := testkit.Get(t, t.store, lease.Key())
		require.NoError(t, t.store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)))
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.NoError(t, c.Hold(ctx, testkit.MustAcquire(t, lease)))
		require.Regexp(t, `^level=INFO msg="session begun" session=s1 replica=a holder=a token=\d+\n`+
			`level=INFO msg="session ended" session=s1 replica=a holder=a token=\d+ cause="replica is shutting down"\n$`, lines())
	})
}
