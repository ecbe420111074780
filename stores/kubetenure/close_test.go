//go:build unix

package kubetenure_test

import (
	"context"
	"errors"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/stores/kubetenure"
)

func TestAStoreThatIsClosedRefusesCalls(t *testing.T) {
	t.Parallel()
	c := running(t)
	store := c.store(t, c.namespace(t))
	watch := live(t, store, widget)
	require.NoError(t, store.Close())
	require.False(t, watch.Live())
	_, err := store.Get(t.Context(), widget)
	require.ErrorIs(t, err, tenure.ErrClosed)
	require.ErrorIs(t, store.Migrate(t.Context()), tenure.ErrClosed)
	require.False(t, storeAnswered(err))
}

func TestNothingBeginsAfterClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var requests atomic.Int32
		answer := make(chan error)
		store := open(t, kubetenure.Config{Namespace: "default", URL: "https://host", Client: &http.Client{Transport: roundTripper{func(*http.Request, func(*http.Request) (*http.Response, error)) (*http.Response, error) {
			requests.Add(1)
			return nil, <-answer
		}, http.DefaultTransport}}})
		done := make(chan error)
		go func() { _, err := store.Get(context.Background(), widget); done <- err }()
		synctest.Wait()
		require.NoError(t, store.Close())
		failed := errors.New("the connection is lost")
		answer <- failed // other requests go to another connection from now on
		require.ErrorIs(t, <-done, failed)
		synctest.Wait()
		require.EqualValues(t, 1, requests.Load())
	})
}

func storeAnswered(err error) bool {
	return errors.Is(err, tenure.ErrNotFound) || errors.Is(err, tenure.ErrSetup) || errors.Is(err, tenure.ErrInvalid)
}
