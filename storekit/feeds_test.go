package storekit_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storekit"
)

var a, b = tenure.Key{Type: "widget", ID: "a"}, tenure.Key{Type: "widget", ID: "b"}

// source delivers the changes that a test makes, each given by its version.
type source struct {
	follows atomic.Int64 // how many funcs run
	calls   atomic.Int64
	changes chan int64
	breaks  chan error
}

func newSource() *source { return &source{changes: make(chan int64), breaks: make(chan error)} }

func (s *source) follow(ctx context.Context, key tenure.Key, tell func(tenure.Change)) error {
	s.follows.Add(1)
	defer s.follows.Add(-1)
	s.calls.Add(1)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-s.breaks:
			return err
		case version := <-s.changes:
			tell(tenure.Change{Object: tenure.Object{Key: key, Version: version}})
		}
	}
}

func wantChange(t *testing.T, sub tenure.ChangeSubscription, want int64) {
	t.Helper()
	select {
	case <-sub.C():
	default:
		t.Errorf("got no hint of change %d", want)
	}
	got, live := sub.Last()
	require.True(t, live && sub.Live())
	require.Equal(t, want, got.Object.Version)
}

func TestAFeedEndsWithItsLastSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from := newSource()
		feeds := storekit.NewFeeds(from.follow, slog.New(slog.DiscardHandler))
		defer feeds.Close()
		first, second := feeds.Watch(a), feeds.Watch(a)
		from.changes <- 1
		synctest.Wait()
		require.EqualValues(t, 1, from.follows.Load(), "one follows for both")
		wantChange(t, first, 1)
		wantChange(t, second, 1)

		first.Stop()
		first.Stop()
		from.changes <- 2
		synctest.Wait()
		wantChange(t, second, 2)

		second.Stop()
		synctest.Wait()
		require.Zero(t, from.follows.Load())
		require.False(t, second.Live())

		third := feeds.Watch(a)
		defer third.Stop()
		second.Stop() // of the feed before
		from.changes <- 3
		synctest.Wait()
		wantChange(t, third, 3)
	})
}

func TestAFeedThatHasLostTrackIsNotLiveAndTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from := newSource()
		feeds := storekit.NewFeeds(from.follow, slog.New(slog.DiscardHandler))
		defer feeds.Close()
		sub := feeds.Watch(a)
		require.False(t, sub.Live(), "before the first state has arrived")
		from.changes <- 1
		synctest.Wait()
		wantChange(t, sub, 1)

		from.breaks <- errors.New("broken")
		synctest.Wait()
		require.False(t, sub.Live())
		<-sub.C() // its reader has to poll from now on

		// The pauses before it tries again grow, but are short again once it was live.
		began := time.Now()
		for range 20 {
			from.breaks <- errors.New("still broken")
		}
		require.Greater(t, time.Since(began), 2*time.Second)
		require.Less(t, time.Since(began), 20*time.Second)
		from.changes <- 2
		from.breaks <- errors.New("broken again")
		began = time.Now()
		from.changes <- 3
		require.Less(t, time.Since(began), 50*time.Millisecond)
	})
}

func TestFeedsThatAreClosedFollowNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from := newSource()
		feeds := storekit.NewFeeds(from.follow, slog.New(slog.DiscardHandler))
		before := feeds.Watch(a)
		from.changes <- 1
		feeds.Close()
		require.Zero(t, from.follows.Load(), "Close waits")
		require.False(t, before.Live())
		after := feeds.Watch(b)
		synctest.Wait()
		require.EqualValues(t, 1, from.calls.Load())
		require.False(t, after.Live())
		after.Stop()
		before.Stop()
	})
}
