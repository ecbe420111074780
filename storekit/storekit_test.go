package storekit_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/storekit"
	"github.com/tenurelib/tenure/storetest"
)

func TestAnErrorSaysWhichOperationFailedAndWhetherItsContextHasEnded(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	broken := errors.New("interrupted")
	for _, test := range []struct {
		ctx  context.Context
		err  error
		want string
	}{
		{ended, nil, ""},
		{t.Context(), broken, "mystore: get widget/a: interrupted"},
		{ended, broken, "mystore: get widget/a: context canceled: interrupted"},
		{ended, context.Canceled, "mystore: get widget/a: context canceled"},
		{ended, tenure.ErrNotFound, "mystore: get widget/a: object not found"}, // so it is certain that there is none
	} {
		err := test.err
		storekit.OpError(test.ctx, &err, "mystore: get", a)
		require.ErrorIs(t, err, test.err)
		if test.want != "" {
			require.EqualError(t, err, test.want)
		}
	}
}

func TestACallWithoutADeadlineGetsOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		for given, want := range map[context.Context]time.Duration{short: time.Second, t.Context(): time.Minute} {
			ctx, cancel := storekit.WithLimit(given, time.Minute)
			defer cancel()
			deadline, _ := ctx.Deadline()
			require.Equal(t, want, deadline.Sub(began))
		}
		require.NoError(t, storekit.Pause(short, 500*time.Millisecond))
		require.ErrorIs(t, storekit.Pause(short, 1000*time.Hour), context.DeadlineExceeded)
	})
}

func TestALoggerThatBlocksHoldsNobodyUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines bytes.Buffer
		unblock := make(chan struct{})
		logger := storekit.Logger(slog.New(slog.NewTextHandler(blocked{unblock, &lines}, nil)))
		logger.Info("one")
		began := time.Now()
		storekit.Flush(logger)
		require.Equal(t, time.Second, time.Since(began))
		close(unblock)
		storekit.Flush(logger)
		require.Contains(t, lines.String(), "msg=one")
	})
}

type blocked struct {
	until chan struct{}
	to    *bytes.Buffer
}

func (b blocked) Write(line []byte) (int, error) {
	<-b.until
	return b.to.Write(line)
}

func TestALostTermIsReportedWithItsSuccessor(t *testing.T) {
	store := storetest.NewMem()
	first := acquire(t, store, "first")
	term, err := storekit.FenceTerm(nil, first)
	require.NoError(t, err)
	require.Equal(t, first, term)
	for _, test := range []struct {
		had   *tenure.Term
		guard tenure.Guard
		want  error
	}{
		{nil, nil, tenure.ErrInvalid},
		{nil, (*tenure.Term)(nil), tenure.ErrInvalid},
		{nil, new(tenure.Term), tenure.ErrInvalid},
		{first, first, errors.ErrUnsupported},
		{nil, claims.Claim{}, errors.ErrUnsupported},
	} {
		_, err := storekit.FenceTerm(test.had, test.guard)
		require.ErrorIs(t, err, test.want)
	}
	require.ErrorIs(t, storekit.CheckFenced(first, first.Key()), tenure.ErrInvalid)
	require.NoError(t, storekit.CheckFenced(first, a))
	require.NoError(t, storekit.CheckFenced(nil, first.Key()))

	obj, err := store.Get(t.Context(), first.Key())
	require.NoError(t, err)
	require.NoError(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)))
	acquire(t, store, "second")
	lost := storekit.LostTo(t.Context(), store, first)
	require.ErrorIs(t, lost, tenure.ErrLost)
	require.ErrorContains(t, lost, "is held by second")
	require.False(t, first.Valid())
	require.ErrorIs(t, storekit.LostTo(t.Context(), store, first), tenure.ErrLost)
}

func acquire(t *testing.T, store tenure.Store, holder string) *tenure.Term {
	t.Helper()
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "storekit"}, Holder: holder})
	require.NoError(t, err)
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	return term
}
