package route

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/internal/testkit"
)

func TestKeysThatAreNotInUseAreForgotten(t *testing.T) {
	testkit.Slow(t)
	rt := &Route{entries: make(map[string]*entry)}
	rt.entry("served").call = &call{}
	for i := range 3 * mostEntries {
		rt.entry(fmt.Sprint(i))
	}
	require.Len(t, rt.entries, mostEntries)
	require.NotNil(t, rt.entry("served").call)
	for i := range mostEntries { // more than that are in use
		rt.entry(fmt.Sprint("used", i)).waiting = 1
	}
	require.Greater(t, len(rt.entries), mostEntries-1)
	require.NotNil(t, rt.entries["used0"])
}

// A transport may go on with a request that was refused.
func TestAnAttemptThatIsOverReadsNothingOfALongBody(t *testing.T) {
	body := strings.NewReader("body")
	s := &stream{ReadCloser: io.NopCloser(body)}
	require.True(t, s.state.CompareAndSwap(0, streamOver))
	_, err := s.Read(make([]byte, 9))
	require.ErrorIs(t, err, errRefused)
	require.Equal(t, 4, body.Len())
	s = &stream{ReadCloser: io.NopCloser(body)}
	_, err = s.Read(make([]byte, 1))
	require.NoError(t, err)
	require.False(t, s.state.CompareAndSwap(0, streamOver), "no other attempt gets it")
}

func TestEachSchemeHasItsProtocol(t *testing.T) {
	by := newTransport(nil).(*carrier)
	by.plain.(*http.Transport).TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
	for scheme, proto := range map[string]string{"http": "HTTP/1.1", "https": "HTTP/2.0", "h2c": "HTTP/2.0"} {
		s := httptest.NewUnstartedServer(http.NotFoundHandler())
		s.EnableHTTP2, s.Config.Protocols = true, new(http.Protocols)
		s.Config.Protocols.SetHTTP1(true)
		s.Config.Protocols.SetHTTP2(true)
		s.Config.Protocols.SetUnencryptedHTTP2(true)
		if scheme == "https" {
			s.StartTLS()
		} else {
			s.Start()
		}
		r, err := http.NewRequest("GET", scheme+"://"+s.Listener.Addr().String(), nil)
		require.NoError(t, err)
		answer, err := by.RoundTrip(r)
		require.NoError(t, err)
		answer.Body.Close()
		require.Equal(t, proto, answer.Proto, scheme)
		by.close()
		s.Close()
	}
}
