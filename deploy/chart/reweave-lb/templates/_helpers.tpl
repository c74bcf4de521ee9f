{{- define "reweave-lb.selector" -}}
app.kubernetes.io/name: reweave-lb
{{- end }}

{{- define "reweave-lb.labels" -}}
{{ include "reweave-lb.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "reweave-lb.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Where the agent answers HTTP: its own default, unless the values say otherwise. */}}
{{- define "reweave-lb.listen" -}}
{{ .Values.agent.listen | default "127.0.0.1:9213" }}
{{- end }}

{{- define "reweave-lb.port" -}}
{{ include "reweave-lb.listen" . | splitList ":" | last }}
{{- end }}

{{/* Not empty where only the node itself reaches it. */}}
{{- define "reweave-lb.loopback" -}}
{{- if hasPrefix "127." (include "reweave-lb.listen" .) }}yes{{ end }}
{{- end }}

{{- define "reweave-lb.stateDir" -}}
{{ index .Values.agent "state-dir" | default "/run/reweave-lb" }}
{{- end }}

{{/* A value as an environment variable has it. Numbers of a values file are floats: 1e+06 is not a number of flows. */}}
{{- define "reweave-lb.text" -}}
{{- if kindIs "slice" . -}}
{{ join "," . }}
{{- else if kindIs "float64" . -}}
{{ int64 . }}
{{- else -}}
{{ . }}
{{- end -}}
{{- end }}

{{/* Every flag is an environment variable too: LB_ and its name. */}}
{{- define "reweave-lb.env" -}}
- name: LB_NODE
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: HOST_IP
  valueFrom:
    fieldRef:
      fieldPath: status.hostIP
- name: LB_BPFFS
  value: /host/bpf/reweave-lb
- name: LB_PROC_SYS
  value: /host/proc/sys
{{- range $flag, $value := .Values.agent }}
- name: LB_{{ $flag | upper | replace "-" "_" }}
  value: {{ include "reweave-lb.text" $value | quote }}
{{- end }}
- name: RUST_LOG
  value: {{ .Values.logLevel }}
{{- end }}

{{/* What every container of the pod has in common. */}}
{{- define "reweave-lb.container" -}}
image: {{ include "reweave-lb.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  {{- include "reweave-lb.env" . | nindent 2 }}
securityContext:
  privileged: false
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsUser: 0
  capabilities:
    drop: [ALL]
    add: {{ toJson .Values.capabilities }}
  # Allows bpf(2) to a container with SYS_ADMIN, in every runtime.
  seccompProfile:
    type: RuntimeDefault
  {{- with .Values.seLinuxOptions }}
  seLinuxOptions:
    {{- toYaml . | nindent 4 }}
  {{- end }}
volumeMounts:
  # Not on /sys/fs/bpf: the runtimes' AppArmor profile forbids writing below /sys/fs, wherever it is from.
  # HostToContainer: a bpffs that is mounted on the node later appears here too.
  - name: bpffs
    mountPath: /host/bpf
    mountPropagation: HostToContainer
  # The container's own /proc/sys is read-only.
  - name: proc-sys-net
    mountPath: /host/proc/sys/net
  - name: state
    mountPath: {{ include "reweave-lb.stateDir" . }}
{{- end }}
